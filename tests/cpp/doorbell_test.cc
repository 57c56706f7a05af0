// Doorbells: nobody who sleeps is forgotten, and nobody who is awake costs a system call. Stress between two processes
// and between threads; a lost wake-up shows as a sleep that only its time-out ends.
#include "runtime/doorbell.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/errors.h"
#include "job.h"
#include "runtime/sockets.h"

namespace trainmover::check {
namespace {

constexpr int kLostMs = 10'000;

/// One after the other, two players count up in shared memory.
struct Table {
  alignas(64) std::atomic<std::uint32_t> turn[2];
};

/// Sleeps until `ready`, as `sleeper`, the way the engine does.
template <typename Ready>
void sleepUntil(Doorbell& bell, Sleeper sleeper, int events, Ready ready) {
  while (!ready()) {
    const std::uint32_t seen = bell.rings();
    bell.announce(sleeper);
    if (ready()) return bell.wake();
    const std::uint64_t start_ms = monotonicMs();
    if (sleeper == Sleeper::kEvent) {
      epoll_event event{};
      ::epoll_wait(events, &event, 1, kLostMs);
      bell.drain();
    } else {
      bell.sleep(seen, std::uint64_t{kLostMs} * 1'000'000);
    }
    bell.wake();
    if (monotonicMs() - start_ms >= kLostMs) fail(__FILE__, __LINE__, "a ring was lost");
  }
}

/// Plays one side; `ring` rings at the other.
template <typename Ring>
void play(Table& table, int side, Doorbell& bell, std::uint32_t rounds, std::uint32_t seed, Ring ring) {
  Descriptor events(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  CHECK_EQ(::epoll_ctl(events.get(), EPOLL_CTL_ADD, bell.event(), &event), 0);
  std::mt19937 random(seed);
  for (std::uint32_t round = 1; round <= rounds; ++round) {
    // Some work of random length, so that the two meet at every point of falling asleep.
    std::atomic<std::uint32_t> spent{0};
    for (std::uint32_t work = random() % 300; work > 0; --work) spent.fetch_add(1, std::memory_order_relaxed);
    if (side == 0) {
      table.turn[0].store(round);
      ring();
    }
    const Sleeper sleeper = random() % 2 == 0 ? Sleeper::kFutex : Sleeper::kEvent;
    const auto& other = table.turn[1 - side];
    sleepUntil(bell, sleeper, events.get(), [&] { return other.load() >= round; });
    if (side == 1) {
      table.turn[1].store(round);
      ring();
    }
  }
}

TEST(no_ring_is_lost_between_processes_whether_they_sleep_on_a_futex_or_an_event) {
  void* memory = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto* table = new (memory) Table{};
  int talk[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, talk), 0);
  runJob(2, [&](Member& member) {
    Doorbell bell;
    const int fd = talk[member.rank()];
    CHECK(sendWith(fd, "x", 1, {bell.memory().get(), bell.event()}));
    pollfd polled{fd, POLLIN, 0};
    CHECK_EQ(::poll(&polled, 1, kLostMs), 1);
    char byte = 0;
    std::vector<Descriptor> received;
    CHECK_EQ(receiveWith(fd, &byte, 1, received, 2), 1);
    CHECK_EQ(received.size(), 2);
    PeerDoorbell other(received[0], std::move(received[1]));
    play(*table, member.rank(), bell, 20'000, static_cast<std::uint32_t>(member.rank()) + 1, [&] { other.ring(); });
  });
  for (const int fd : talk) ::close(fd);
  ::munmap(memory, sizeof(Table));
}

TEST(no_ring_is_lost_between_threads) {
  Table table{};
  Doorbell bells[2];
  std::string why[2];
  std::thread threads[2];
  for (int side = 0; side < 2; ++side) {
    threads[side] = std::thread([&, side] {
      try {
        play(table, side, bells[side], 10'000, static_cast<std::uint32_t>(side) + 7, [&] { bells[1 - side].ring(); });
      } catch (const Failure& failure) {
        why[side] = failure.what;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(why[0] + why[1], std::string());
}

// Several ring at one sleeper, and none of what they have done is missed.
TEST(several_threads_may_ring_at_once) {
  Doorbell bell;
  Descriptor events(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  CHECK_EQ(::epoll_ctl(events.get(), EPOLL_CTL_ADD, bell.event(), &event), 0);
  constexpr std::uint32_t kEach = 5'000;
  std::atomic<std::uint32_t> done{0};
  std::vector<std::thread> ringers;
  for (int i = 0; i < 3; ++i) {
    ringers.emplace_back([&] {
      for (std::uint32_t n = 0; n < kEach; ++n) {
        done.fetch_add(1);
        bell.ring();
      }
    });
  }
  std::uint32_t seen = 0;
  std::string why;
  try {
    for (int turn = 0; seen < 3 * kEach; ++turn) {
      sleepUntil(bell, turn % 2 == 0 ? Sleeper::kFutex : Sleeper::kEvent, events.get(),
                 [&] { return done.load() > seen; });
      seen = done.load();
    }
  } catch (const Failure& failure) {
    why = failure.what;
  }
  for (auto& ringer : ringers) ringer.join();
  CHECK_EQ(why, std::string());
}

TEST(ringing_at_nobody_changes_nothing_and_a_sleeper_is_rung_at_once) {
  Doorbell bell;
  const auto eventCount = [&] {
    pollfd polled{bell.event(), POLLIN, 0};
    return ::poll(&polled, 1, 0);
  };
  bell.ring();
  CHECK_EQ(bell.rings(), 0);
  CHECK_EQ(eventCount(), 0);
  bell.announce(Sleeper::kFutex);
  bell.ring();
  bell.ring();
  CHECK_EQ(bell.rings(), 1);
  CHECK_EQ(eventCount(), 0);
  bell.announce(Sleeper::kEvent);
  bell.ring();
  CHECK_EQ(bell.rings(), 2);
  CHECK_EQ(eventCount(), 1);
  bell.drain();
  CHECK_EQ(eventCount(), 0);
  bell.announce(Sleeper::kEvent);
  bell.wake();
  bell.ring();
  CHECK_EQ(bell.rings(), 2);
}

TEST(sleep_ends_with_its_time_out_and_at_once_when_rings_have_changed) {
  Doorbell bell;
  const std::uint64_t start_ms = monotonicMs();
  bell.sleep(bell.rings(), 20'000'000);
  CHECK(monotonicMs() - start_ms >= 19);
  bell.sleep(bell.rings() + 1, std::uint64_t{kLostMs} * 1'000'000);
  CHECK(monotonicMs() - start_ms < kLostMs);
}

TEST(memory_that_is_no_doorbell_is_refused) {
  Descriptor memory;
  const Mapping other = Mapping::create("test", 2 * kDoorbellBytes, memory);
  CHECK_THROWS(PeerDoorbell(memory, Descriptor()), TransportError);
  CHECK_THROWS(PeerDoorbell(Descriptor(), Descriptor()), TransportError);
  // Not sealed: its owner could shrink it under whoever rings.
  Descriptor unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(::ftruncate(unsealed.get(), kDoorbellBytes), 0);
  CHECK_THROWS(PeerDoorbell(unsealed, Descriptor()), TransportError);
}

}  // namespace
}  // namespace trainmover::check
