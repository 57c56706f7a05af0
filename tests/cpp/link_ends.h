// Connected pairs of links for tests, within one process or across a fork, made the way the runtime makes them: what
// the two ends need of each other (descriptors, addresses) goes over a unix socket. And streams of bytes to send over
// them. Used by link_conformance.h and the tests of channels.
#pragma once

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mapping.h"
#include "check.h"
#include "runtime/doorbell.h"
#include "runtime/sockets.h"
#include "transport/link_closed.h"
#include "transport/shm/link.h"
#include "transport/tcp/link.h"

namespace trainmover::check {

constexpr std::uint64_t kConnectLimitMs = 20'000;

enum class LinkKind { kShm, kShmWithoutRemoteReads, kTcp };
constexpr LinkKind kLinkKinds[] = {LinkKind::kShm, LinkKind::kShmWithoutRemoteReads, LinkKind::kTcp};

inline std::string nameOf(LinkKind kind) {
  return kind == LinkKind::kShm ? "shm" : kind == LinkKind::kTcp ? "tcp" : "shm_without_remote_reads";
}

/// One end, with what wakes whoever sleeps for it. Two steps: the constructor tells the other end, connect() hears it.
class LinkEnd {
 public:
  /// `fd`: this end of a unix socket pair; taken over.
  LinkEnd(LinkKind kind, bool creator, int fd) : kind_(kind), creator_(creator), talk_(fd) {
    std::vector<int> passed;
    Descriptor memory;
    std::string address;
    if (kind_ == LinkKind::kTcp) {
      if (creator_) listener_ = listenTcp("127.0.0.1", address);
    } else {
      if (creator_) mapping_ = Mapping::create("test-link", shm::segmentBytes(), memory);
      passed = {bell_.memory().get(), bell_.event()};
      if (creator_) passed.push_back(memory.get());
    }
    if (address.empty()) address = "nothing";  // descriptors travel with at least one byte
    CHECK(sendWith(talk_.get(), address.data(), address.size(), passed));
  }

  /// The one that is not the creator first, where both are in one thread.
  void connect() {
    pollfd polled{talk_.get(), POLLIN, 0};
    CHECK_EQ(::poll(&polled, 1, kConnectLimitMs), 1);
    char bytes[256];
    std::vector<Descriptor> received;
    const long got = receiveWith(talk_.get(), bytes, sizeof bytes, received, 3);
    CHECK(got > 0);
    const std::string text(bytes, static_cast<std::size_t>(got));
    if (kind_ == LinkKind::kTcp) return connectSocket(text);
    CHECK_EQ(received.size(), creator_ ? 2 : 3);
    if (!creator_) mapping_ = Mapping::attach(received[2], shm::segmentBytes());
    peer_bell_ = std::make_shared<PeerDoorbell>(received[0], std::move(received[1]));
    shm::LinkConfig config;
    config.creator = creator_;
    config.read_remote = kind_ == LinkKind::kShm;
    config.ring_peer = [bell = peer_bell_, rings = rings_] {
      ++*rings;
      bell->ring();
    };
    link_ = shm::makeLink(std::move(mapping_), std::move(config));
  }

  Link& link() { return *link_; }
  std::unique_ptr<Link> takeLink() { return std::move(link_); }
  void close() { link_.reset(); }
  /// Times this end rang at the other.
  int rings() const { return *rings_; }

  /// Calls `attempt` until it returns true; sleeps while it does not, the way the engine does: announce, look once
  /// more, sleep. Ends the test when the other end moved but rang nothing.
  template <typename Attempt>
  void untilTrue(Attempt attempt) {
    constexpr std::uint64_t kSleepMs = 10'000;
    while (!attempt()) {
      bool woken = true;
      if (link_->descriptor() >= 0) {
        epoll_event event{};
        woken = ::epoll_wait(events_.get(), &event, 1, kSleepMs) > 0;
      } else {
        const std::uint32_t seen = bell_.rings();
        bell_.announce(Sleeper::kFutex);
        if (attempt()) return bell_.wake();
        const std::uint64_t start_ms = monotonicMs();
        bell_.sleep(seen, kSleepMs * 1'000'000);
        woken = monotonicMs() - start_ms < kSleepMs;
        bell_.wake();
      }
      if (!woken) fail(__FILE__, __LINE__, "slept for 10 s: the wake-up was lost, or the other end is stuck");
    }
  }

 private:
  void connectSocket(const std::string& address) {
    Descriptor socket;
    if (creator_) {
      pollfd polled{listener_.get(), POLLIN, 0};
      CHECK_EQ(::poll(&polled, 1, kConnectLimitMs), 1);
      socket = acceptOn(listener_);
    } else {
      int error = 0;
      socket = connectTcp(address, error);
      CHECK_EQ(error, 0);
      pollfd polled{socket.get(), POLLOUT, 0};
      CHECK_EQ(::poll(&polled, 1, kConnectLimitMs), 1);
      CHECK_EQ(connectError(socket), 0);
    }
    CHECK(static_cast<bool>(socket));
    tcp::configureSocket(socket.get(), 30'000);
    events_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    CHECK_EQ(::epoll_ctl(events_.get(), EPOLL_CTL_ADD, socket.get(), &event), 0);
    link_ = tcp::makeLink(std::move(socket));
  }

  LinkKind kind_;
  bool creator_;
  Descriptor talk_, listener_, events_;
  Doorbell bell_;
  Mapping mapping_;
  std::shared_ptr<PeerDoorbell> peer_bell_;
  std::shared_ptr<int> rings_ = std::make_shared<int>(0);
  std::unique_ptr<Link> link_;
};

/// Unix sockets that will carry what two ends tell each other; plain numbers, so that they survive a fork.
struct TalkingPair {
  TalkingPair() { CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0); }
  int fds[2];
};

/// Both ends in this process.
struct LinkPair {
  explicit LinkPair(LinkKind kind, TalkingPair talk = {}) : a(kind, true, talk.fds[0]), b(kind, false, talk.fds[1]) {
    b.connect();
    a.connect();
  }
  LinkEnd a, b;
};

/// The stream in one direction from byte `at` on: a period that no ring or chunk shares, and cheap under sanitizers.
inline void copyStream(std::uint64_t at, unsigned direction, unsigned char* to, std::size_t bytes) {
  static const std::vector<unsigned char> pattern = [] {
    std::vector<unsigned char> random(999'983);
    std::mt19937 engine(1);
    for (auto& byte : random) byte = static_cast<unsigned char>(engine());
    return random;
  }();
  at += direction * 12'345;
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t from = (at + done) % pattern.size();
    const std::size_t count = std::min(bytes - done, pattern.size() - from);
    std::memcpy(to + done, pattern.data() + from, count);
    done += count;
  }
}

/// Writes a stream in random chunks and parts; the memory written from is overwritten at once.
class StreamWriter {
 public:
  StreamWriter(Link& link, std::uint64_t total, unsigned direction, std::uint32_t seed)
      : link_(link), total_(total), direction_(direction), random_(seed) {}

  bool done() const { return at_ == total_; }
  std::uint64_t written() const { return at_; }
  /// Bytes taken.
  std::size_t once(std::size_t chunk_max = 70'000) {
    if (done()) return 0;
    const std::size_t chunk = std::min<std::uint64_t>(total_ - at_, 1 + random_() % chunk_max);
    bytes_.resize(chunk);
    copyStream(at_, direction_, bytes_.data(), chunk);
    IoSlice parts[3];
    const std::size_t one = random_() % (chunk + 1), two = one + random_() % (chunk - one + 1);
    parts[0] = {bytes_.data(), one};
    parts[1] = {bytes_.data() + one, two - one};
    parts[2] = {bytes_.data() + two, chunk - two};
    const std::size_t taken = link_.write(parts, 3);
    std::memset(bytes_.data(), 0xAA, chunk);
    if (taken > chunk) fail(__FILE__, __LINE__, "the link took more than it was given");
    at_ += taken;
    return taken;
  }

 private:
  Link& link_;
  std::uint64_t total_, at_ = 0;
  unsigned direction_;
  std::mt19937 random_;
  std::vector<unsigned char> bytes_;
};

/// Reads a stream in random chunks and checks each byte.
class StreamReader {
 public:
  StreamReader(Link& link, std::uint64_t total, unsigned direction, std::uint32_t seed)
      : link_(link), total_(total), direction_(direction), random_(seed) {}

  bool done() const { return at_ == total_; }
  std::size_t once(std::size_t chunk_max = 70'000) {
    if (done()) return 0;
    bytes_.resize(1 + random_() % chunk_max);
    const std::size_t got = link_.read(bytes_.data(), bytes_.size());
    if (got > bytes_.size()) fail(__FILE__, __LINE__, "the link gave more than was asked for");
    expected_.resize(got);
    copyStream(at_, direction_, expected_.data(), got);
    if (got > 0 && std::memcmp(bytes_.data(), expected_.data(), got) != 0) {
      fail(__FILE__, __LINE__, "wrong bytes among those after byte " + std::to_string(at_));
    }
    at_ += got;
    return got;
  }

 private:
  Link& link_;
  std::uint64_t total_, at_ = 0;
  unsigned direction_;
  std::mt19937 random_;
  std::vector<unsigned char> bytes_, expected_;
};

}  // namespace trainmover::check
