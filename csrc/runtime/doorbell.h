// How processes of one machine wake each other. Each process has one doorbell: a page of shared memory and an eventfd.
// Whoever changed shared memory that another waits for rings there; that costs two loads when nobody sleeps. The
// process sleeps either on the page (futex: cheapest) or in epoll through the eventfd (when sockets matter too).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/descriptor.h"
#include "base/mapping.h"

namespace trainmover {

/// Who has to be woken.
enum class Sleeper : std::uint32_t { kNobody = 0, kFutex = 1, kEvent = 2 };

struct DoorbellPage {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleeper;
};
constexpr std::size_t kDoorbellBytes = 4096;

/// Rings the doorbell on `page`: call after the shared memory was changed. Any process, any thread.
void ring(DoorbellPage* page, int event);

/// This process's own.
class Doorbell {
 public:
  /// Throws TransportError.
  Doorbell();

  void ring() { trainmover::ring(page_, event_.get()); }
  /// Nobody sleeps: rings need no system call.
  void wake() { page_->sleeper.store(0, std::memory_order_seq_cst); }
  /// Announces that somebody is about to sleep. What was waited for must be looked at once more afterwards.
  void announce(Sleeper sleeper) {
    page_->sleeper.store(static_cast<std::uint32_t>(sleeper), std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  std::uint32_t rings() const { return page_->rings.load(std::memory_order_seq_cst); }
  /// Sleeps until rings() differs from `seen` or for `timeout_ns`.
  void sleep(std::uint32_t seen, std::uint64_t timeout_ns);
  /// Empties the eventfd.
  void drain();

  int event() const { return event_.get(); }
  const Descriptor& memory() const { return memory_; }

 private:
  Descriptor memory_;
  Mapping mapping_;
  DoorbellPage* page_;
  Descriptor event_;
};

/// Another process's, once its descriptors were passed to us.
class PeerDoorbell {
 public:
  /// Throws TransportError.
  PeerDoorbell(const Descriptor& memory, Descriptor event);
  void ring() { trainmover::ring(static_cast<DoorbellPage*>(mapping_.data()), event_.get()); }

 private:
  Mapping mapping_;
  Descriptor event_;
};

}  // namespace trainmover
