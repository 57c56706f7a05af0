#include "runtime/engine.h"

#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>

#include "base/clock.h"
#include "base/errors.h"

namespace trainmover {
namespace {

constexpr int kSpins = 2000;                           // with a core for each rank: about 20 us
constexpr std::uint64_t kYieldNs = 200'000;            // then others may run in between
constexpr std::uint64_t kLongYieldNs = 500'000;        // somebody else computed on the core meanwhile
constexpr int kSleepsAtLeast = 2, kSleepsAtMost = 64;  // after a long yield
constexpr int kYieldsPerSleep = 4;                     // so many short ones forgive a sleep of the next time
constexpr std::uint64_t kSleepNs = 10'000'000;         // then sleep; limits are looked at this often
constexpr int kPollsBetweenLimits = 4096;
constexpr int kRoundsOfProgressThread = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// How a driver waits between two looks: spin, yield, sleep. Yielding is cheapest while only waiting ranks share the
// core. Beside a process that computes it is the worst: the kernel lets that one run out its slice of milliseconds,
// while a sleeper that is woken comes first. A yield that took long tells the two apart: some waits then do without,
// twice as many each time that it was long again.
class Engine::Backoff {
 public:
  enum class Next { kSpin, kYield, kSleep };
  Backoff(bool may_spin, bool sleeps, Crowd& crowd) : may_spin_(may_spin), sleeps_(sleeps), crowd_(crowd) { moved(); }
  void moved() {
    spins_ = 0;
    yielded_ns_ = 0;
    crowded_ = crowd_.sleep_at_once > 0;
    if (crowded_) --crowd_.sleep_at_once;
  }
  Next next() {
    if (sleeps_) return Next::kSleep;
    if (may_spin_ && spins_ < kSpins) {
      ++spins_;
      return Next::kSpin;
    }
    return crowded_ || yielded_ns_ > kYieldNs ? Next::kSleep : Next::kYield;
  }
  void yield() {
    const std::uint64_t start_ns = monotonicNs();
    ::sched_yield();
    const std::uint64_t took_ns = monotonicNs() - start_ns;
    yielded_ns_ += took_ns;
    if (took_ns < kLongYieldNs) {
      crowd_.penalty = std::max(crowd_.penalty - 1, kSleepsAtLeast * kYieldsPerSleep);
      return;
    }
    crowd_.sleep_at_once = crowd_.penalty / kYieldsPerSleep;
    crowd_.penalty = std::min(2 * crowd_.penalty, kSleepsAtMost * kYieldsPerSleep);
    crowded_ = true;
  }

 private:
  const bool may_spin_, sleeps_;
  Crowd& crowd_;
  bool crowded_ = false;
  int spins_ = 0;
  std::uint64_t yielded_ns_ = 0;
};

Engine::Engine(bool cores_for_all) : cores_for_all_(cores_for_all), data_events_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!data_events_) throw TransportError(std::string("epoll_create1 failed: ") + errorText(errno));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = doorbell_.event();
  ::epoll_ctl(data_events_.get(), EPOLL_CTL_ADD, doorbell_.event(), &event);
}

Engine::~Engine() = default;

void Engine::addSocket(int fd) {
  // Edge-triggered: every look at a link reads and writes until nothing moves, so no change is ever missed and the set
  // never has to be changed.
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.fd = fd;
  if (::epoll_ctl(data_events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw TransportError(std::string("epoll_ctl failed: ") + errorText(errno));
  }
}

void Engine::post(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(posted_mutex_);
    posted_.push_back(std::move(work));
    has_posted_.store(true, std::memory_order_seq_cst);
  }
  doorbell_.ring();
}

void Engine::runPosted() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard<std::mutex> lock(posted_mutex_);
    work.swap(posted_);
    has_posted_.store(false, std::memory_order_seq_cst);
  }
  for (auto& task : work) {
    try {
      task();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "trainmover: %s\n", error.what());  // a link could not be added: its users time out
    }
  }
}

void Engine::activate(std::shared_ptr<Driven> driven) {
  if (std::find(active_.begin(), active_.end(), driven) == active_.end()) active_.push_back(std::move(driven));
}

bool Engine::poll() {
  bool moved = false;
  if (has_posted_.load(std::memory_order_acquire)) {
    runPosted();
    moved = true;
  }
  for (std::size_t i = 0; i < active_.size();) {
    const std::shared_ptr<Driven> driven = active_[i];
    moved |= driven->advance();
    if (driven->outstanding()) {
      ++i;
    } else {
      const auto at = std::find(active_.begin(), active_.end(), driven);
      if (at != active_.end()) active_.erase(at);
    }
  }
  return moved;
}

void Engine::submitted(bool waited_at_once) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (driven_) {
    // The driver may sleep where it does not see what this operation needs.
    doorbell_.ring();
    return;
  }
  if (waited_at_once) return;
  take();
  leave(lock);
}

void Engine::settle() {
  if (!has_ended_.load(std::memory_order_acquire)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (driven_) return;
  take();
  leave(lock);
}

void Engine::take() {
  driven_ = true;
  driver_ = std::this_thread::get_id();
}

void Engine::wait(PendingOperation& operation, std::uint64_t timeout_ms) {
  if (operation.finished()) return;
  const std::shared_ptr<WaitCounters> counters = operation.waits;
  if (counters) counters->waits.fetch_add(1, std::memory_order_relaxed);
  const std::uint64_t start_ns = monotonicNs();
  const std::uint64_t deadline_ms = timeout_ms == 0 ? ~std::uint64_t{0} : start_ns / 1'000'000u + timeout_ms;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!operation.finished()) {
    if (!driven_) {
      take();
      doorbell_.wake();
      drive(lock, operation, deadline_ms);
      leave(lock);
    } else if (driver_ == std::this_thread::get_id()) {
      drive(lock, operation, deadline_ms);  // a callback that this very driver runs waits for another operation
    } else {
      ++queued_;
      changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return operation.finished() || !driven_; });
      --queued_;
    }
    if (!operation.finished() && monotonicMs() >= deadline_ms) {
      throw CollectiveTimeout("waited " + std::to_string(timeout_ms) + " ms for " + operation.description +
                              ", which has not ended; it goes on");
    }
  }
  if (!driven_ && queued_ == 0 && !active_.empty()) {
    take();  // another driver has handed over to this thread, which needs nothing any more
    leave(lock);
  }
  if (counters) counters->wait_ns.fetch_add(monotonicNs() - start_ns, std::memory_order_relaxed);
}

void Engine::drive(std::unique_lock<std::mutex>& lock, PendingOperation& operation, std::uint64_t deadline_ms) {
  Backoff backoff(cores_for_all_, operation.sleeps, crowd_);
  int polls = 0;
  while (!operation.finished()) {
    if (poll()) {
      backoff.moved();
      runCallbacks(lock);
      if (operation.finished()) return;
    }
    const bool look_at_limits = ++polls % kPollsBetweenLimits == 0;
    const Backoff::Next next = backoff.next();
    if (next == Backoff::Next::kSleep || look_at_limits) {
      const std::uint64_t now_ms = monotonicMs();
      for (std::size_t i = 0; i < active_.size(); ++i) active_[i]->checkLimits(now_ms);
      if (operation.finished() || now_ms >= deadline_ms) return;
    }
    if (next == Backoff::Next::kSleep) {
      sleepBriefly(lock, operation.waits.get());
    } else {
      lock.unlock();
      next == Backoff::Next::kSpin ? relax() : backoff.yield();
      lock.lock();
    }
  }
}

bool Engine::waitsForSockets() const {
  return std::any_of(active_.begin(), active_.end(), [](const auto& driven) { return driven->waitsForSockets(); });
}

void Engine::sleepBriefly(std::unique_lock<std::mutex>& lock, WaitCounters* counters) {
  const bool sockets = waitsForSockets();
  const std::uint32_t seen = doorbell_.rings();
  doorbell_.announce(sockets ? Sleeper::kEvent : Sleeper::kFutex);
  if (poll()) {
    doorbell_.wake();
    runCallbacks(lock);
    return;
  }
  if (counters != nullptr) counters->sleeps.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  if (sockets) {
    epoll_event events[8];
    ::epoll_wait(data_events_.get(), events, 8, static_cast<int>(kSleepNs / 1'000'000u));
    doorbell_.drain();
  } else {
    doorbell_.sleep(seen, kSleepNs);
  }
  doorbell_.wake();
  lock.lock();
}

// The driver has done its part: hand over to another waiting thread, or to the progress thread when work is left.
void Engine::leave(std::unique_lock<std::mutex>& lock) {
  runCallbacks(lock);
  outstanding_.store(!active_.empty(), std::memory_order_relaxed);
  if (queued_ == 0 && (!active_.empty() || hasPosted())) {
    armProgressThread();
    if (poll()) {
      runCallbacks(lock);
      doorbell_.ring();
    }
  }
  driven_ = false;
  if (queued_ > 0) changed_.notify_all();
}

void Engine::armProgressThread() {
  if (!armed_.exchange(true, std::memory_order_acq_rel) && arm_) arm_();
  doorbell_.announce(Sleeper::kEvent);
}

void Engine::driveBriefly() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (driven_) return;  // and what has come is for that driver
  // Socket events are reported once; while they lie there the nested view would fire again and again.
  epoll_event seen[64];
  for (int rounds = 0; rounds < 16 && ::epoll_wait(data_events_.get(), seen, 64, 0) == 64; ++rounds) {
  }
  doorbell_.drain();
  take();
  doorbell_.wake();
  const std::uint64_t now_ms = monotonicMs();
  for (std::size_t i = 0; i < active_.size(); ++i) active_[i]->checkLimits(now_ms);
  for (int rounds = 0; rounds < kRoundsOfProgressThread && poll(); ++rounds) runCallbacks(lock);
  leave(lock);
}

void Engine::noteEnded(std::shared_ptr<PendingOperation> operation) {
  if (operation) {
    ended_.push_back(std::move(operation));
    has_ended_.store(true, std::memory_order_release);
  }
  if (queued_ > 0) changed_.notify_all();
}

void Engine::runCallbacks(std::unique_lock<std::mutex>& lock) {
  while (!ended_.empty()) {
    std::vector<std::shared_ptr<PendingOperation>> ended;
    ended.swap(ended_);
    has_ended_.store(false, std::memory_order_release);
    std::vector<std::function<void()>> callbacks;
    for (auto& operation : ended) {
      for (auto& callback : operation->takeCallbacks()) callbacks.push_back(std::move(callback));
    }
    lock.unlock();  // buffers and futures go with the operations, and must not go under the lock
    for (auto& callback : callbacks) {
      try {
        callback();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "trainmover: a callback failed: %s\n", error.what());
      }
    }
    ended.clear();
    callbacks.clear();
    lock.lock();
    driver_ = std::this_thread::get_id();
  }
}

bool Engine::abort(const AbortCause& cause) {
  {
    std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted_ || cause.generation != generation()) return false;
    aborted_ = cause;
    aborted_flag_.store(true, std::memory_order_release);
  }
  post([this, cause] {
    {
      std::lock_guard<std::mutex> lock(abort_mutex_);
      if (!aborted_ || aborted_->generation != cause.generation) return;  // resumed meanwhile, which failed them all
    }
    const auto active = active_;
    for (const auto& driven : active) driven->fail(cause);
  });
  return true;
}

void Engine::enter(Generation generation) {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  generation_.store(generation, std::memory_order_release);
  aborted_.reset();
  aborted_flag_.store(false, std::memory_order_release);
}

std::optional<AbortCause> Engine::aborted() const {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  return aborted_;
}

void PendingOperation::wait(std::chrono::milliseconds timeout) {
  // Once ended, an operation may outlive the engine.
  if (!finished()) engine_.wait(*this, timeout.count() > 0 ? static_cast<std::uint64_t>(timeout.count()) : 0);
  if (error_) std::rethrow_exception(error_);
}

void PendingOperation::whenFinished(std::function<void()> callback) {
  if (!finished()) {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    if (!finished()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void PendingOperation::end(std::exception_ptr error) {
  if (finished()) return;
  if (recorder != nullptr) {
    recorder->update(record, error ? FlightRecord::State::kFailed : FlightRecord::State::kCompleted, wallClockNs());
  }
  if (traced && !error) traced->ended(received_bytes_);
  error_ = std::move(error);
  finished_.store(true, std::memory_order_release);
  engine_.noteEnded(callbacks_.empty() ? nullptr : shared_from_this());
}

}  // namespace trainmover
