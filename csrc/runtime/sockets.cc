#include "runtime/sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/errors.h"

namespace trainmover {
namespace {

constexpr int kBacklog = 512;
constexpr std::size_t kDescriptorsMax = 4;  // in one message

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

bool parse(const std::string& host, std::uint16_t port, Address& address) {
  auto* four = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    address.bytes = sizeof(sockaddr_in);
    return true;
  }
  if (::inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    address.bytes = sizeof(sockaddr_in6);
    return true;
  }
  return false;
}

Address unixAddress(const std::string& name) {
  Address address;
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  local->sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract: no file.
  const std::size_t length = std::min(name.size(), sizeof(local->sun_path) - 1);
  std::memcpy(local->sun_path + 1, name.data(), length);
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

Descriptor newSocket(int family) { return Descriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

void listenAt(const Descriptor& socket, const Address& address, const std::string& where) {
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw TransportError("cannot listen on " + where + ": " + errorText(errno));
  }
}

Descriptor connectTo(const Address& address, int& error) {
  Descriptor socket = newSocket(address.storage.ss_family);
  error = 0;
  if (socket && ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) == 0) {
    return socket;
  }
  if (socket && errno == EINPROGRESS) return socket;
  error = errno;
  return {};
}

}  // namespace

Descriptor listenTcp(const std::string& host, std::string& bound) {
  Address address;
  if (!parse(host, 0, address)) {
    throw TransportError("found \"" + host +
                         "\" as address to bind, expected a numeric IPv4 or IPv6 address of this "
                         "machine (TRAINMOVER_BIND_ADDRESS)");
  }
  Descriptor socket = newSocket(address.storage.ss_family);
  listenAt(socket, address, host);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.bytes);
  const std::uint16_t port = address.storage.ss_family == AF_INET
                                 ? reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port
                                 : reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port;
  bound = host + ":" + std::to_string(ntohs(port));
  return socket;
}

Descriptor listenUnix(const std::string& name) {
  Descriptor socket = newSocket(AF_UNIX);
  listenAt(socket, unixAddress(name), "abstract socket " + name);
  return socket;
}

Descriptor acceptOn(const Descriptor& listener) {
  return Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

Descriptor connectTcp(const std::string& where, int& error) {
  const std::size_t colon = where.rfind(':');
  Address address;
  error = EINVAL;
  if (colon == std::string::npos || where.size() - colon > 6) return {};
  const unsigned long port = std::strtoul(where.c_str() + colon + 1, nullptr, 10);
  if (port == 0 || port > 65535 || !parse(where.substr(0, colon), static_cast<std::uint16_t>(port), address)) return {};
  return connectTo(address, error);
}

Descriptor connectUnix(const std::string& name, int& error) { return connectTo(unixAddress(name), error); }

int connectError(const Descriptor& socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  return error;
}

bool sendWith(int fd, const void* data, std::size_t bytes, const std::vector<int>& descriptors) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsMax * sizeof(int))] = {};
  if (!descriptors.empty()) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(control), descriptors.data(), descriptors.size() * sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes);
}

long peekWith(int fd, void* data, std::size_t bytes, bool& ended) {
  ended = false;
  const ssize_t got = ::recv(fd, data, bytes, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0) return got;
  ended = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  return 0;
}

long receiveWith(int fd, void* data, std::size_t bytes, std::vector<Descriptor>& received, std::size_t limit) {
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsMax * sizeof(int))] = {};
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  const ssize_t got = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return got == 0 ? -1 : (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1);
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int passed = -1;
      std::memcpy(&passed, CMSG_DATA(control) + i * sizeof(int), sizeof passed);
      received.emplace_back(passed);
    }
  }
  return received.size() > limit ? -1 : got;
}

}  // namespace trainmover
