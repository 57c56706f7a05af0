#include "runtime/doorbell.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <utility>

#include "base/errors.h"

namespace trainmover {

void ring(DoorbellPage* page, int event) {
  // The fence orders the caller's change of shared memory before the look at `sleeper`; the sleeper announces itself
  // before it looks at the memory a last time. One of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (page->sleeper.load(std::memory_order_seq_cst) == 0) return;
  const auto sleeper = static_cast<Sleeper>(page->sleeper.exchange(0, std::memory_order_seq_cst));
  if (sleeper == Sleeper::kFutex) {
    page->rings.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, &page->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  } else if (sleeper == Sleeper::kEvent) {
    page->rings.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t one = 1;
    // Fails only when 2^64 - 2 rings were not yet read, and then the reader is awake anyway.
    [[maybe_unused]] const ssize_t written = ::write(event, &one, sizeof one);
  }
}

Doorbell::Doorbell()
    : mapping_(Mapping::create("trainmover-doorbell", kDoorbellBytes, memory_)),
      page_(static_cast<DoorbellPage*>(mapping_.data())),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw TransportError(std::string("making an eventfd failed: ") + errorText(errno));
}

void Doorbell::sleep(std::uint32_t seen, std::uint64_t timeout_ns) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000u);
  limit.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000u);
  ::syscall(SYS_futex, &page_->rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Doorbell::drain() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
}

PeerDoorbell::PeerDoorbell(const Descriptor& memory, Descriptor event)
    : mapping_(Mapping::attach(memory, kDoorbellBytes)), event_(std::move(event)) {}

}  // namespace trainmover
