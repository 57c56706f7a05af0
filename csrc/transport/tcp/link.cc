#include "transport/tcp/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "transport/link_closed.h"

namespace trainmover::tcp {
namespace {

// Small reads are served from here, so that a header and a short payload cost one system call.
constexpr std::size_t kReadAheadBytes = std::size_t{32} << 10;

class TcpLink final : public Link {
 public:
  explicit TcpLink(Descriptor socket) : socket_(std::move(socket)) {}

  // What the peer sent and nobody will read must be taken out first: closing with unread bytes makes the kernel reset
  // the connection, and the peer would lose what we sent last.
  ~TcpLink() override {
    ::shutdown(socket_.get(), SHUT_WR);
    unsigned char unread[kReadAheadBytes];
    for (int rounds = 0; rounds < 64; ++rounds) {
      if (::recv(socket_.get(), unread, sizeof unread, MSG_DONTWAIT) <= 0) break;
    }
  }

  std::size_t write(const IoSlice* parts, int count) override {
    iovec vectors[8];
    const int used = std::min(count, 8);
    for (int i = 0; i < used; ++i) vectors[i] = {const_cast<void*>(parts[i].data), parts[i].bytes};
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<std::size_t>(used);
    for (;;) {
      const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0) return static_cast<std::size_t>(sent);
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return 0;
      throw LinkClosed(std::string("sending failed: ") + errorText(errno));
    }
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (begin_ == end_) {
      if (bytes >= kReadAheadBytes) return receive(data, bytes);
      begin_ = end_ = 0;  // also when receive() throws
      activate();
      end_ = receive(ahead_.data(), ahead_.size());
    }
    const std::size_t got = std::min(bytes, end_ - begin_);
    std::memcpy(data, ahead_.data() + begin_, got);
    begin_ += got;
    return got;
  }

  bool canReadRemote() const override { return false; }
  void readRemote(std::uint64_t, void*, std::size_t) override {
    throw std::logic_error("a tcp link cannot read remote memory");
  }
  int descriptor() const override { return socket_.get(); }
  void notify() override {}
  void activate() override {
    if (ahead_.empty()) ahead_.resize(kReadAheadBytes);
  }
  bool isClosed() const override {
    pollfd polled{socket_.get(), POLLRDHUP, 0};
    return ::poll(&polled, 1, 0) > 0;
  }
  std::size_t heldBytes() const override { return ahead_.size(); }
  const char* transport() const override { return "tcp"; }

 private:
  std::size_t receive(void* data, std::size_t bytes) {
    for (;;) {
      const ssize_t got = ::recv(socket_.get(), data, bytes, MSG_DONTWAIT);
      if (got > 0) return static_cast<std::size_t>(got);
      if (got == 0) throw LinkClosed("closed the connection");
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      throw LinkClosed(std::string("receiving failed: ") + errorText(errno));
    }
  }

  Descriptor socket_;
  std::vector<unsigned char> ahead_;
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace

void configureSocket(int fd, std::uint64_t timeout_ms) {
  const int on = 1;
  const int seconds = static_cast<int>(std::max<std::uint64_t>(1, timeout_ms / 1000 / 4));
  const int probes = 3;
  const unsigned int user_timeout = static_cast<unsigned int>(timeout_ms);
  // Not all are known to every kernel; without them heartbeats still find a silent peer.
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof user_timeout);
}

std::unique_ptr<Link> makeLink(Descriptor socket) {
  // Data that a busy receiver does not take is no sign of its death: on links, that is for heartbeats to tell.
  const unsigned int none = 0;
  (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &none, sizeof none);
  return std::make_unique<TcpLink>(std::move(socket));
}

}  // namespace trainmover::tcp
