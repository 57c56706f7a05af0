// Progress: who drives outstanding operations, how waiting threads spin, yield and sleep, and what an abort does.
//
// One lock guards everything that moves data. A thread that waits drives all operations itself, not only its own; other
// waiting threads sleep until theirs is done or until the driver leaves. When nobody waits, the progress thread
// (progress_thread.cc) drives, woken by the doorbell or by a socket.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/types.h"
#include "runtime/doorbell.h"
#include "runtime/pending_operation.h"

namespace trainmover {

/// Why everything outstanding fails.
struct AbortCause {
  Generation generation = 0;
  int culprit = -1;  // global rank, or -1
  std::string why;
  bool lost = false;    // the culprit died: direct waiters get PeerLost
  bool silent = false;  // the culprit gave no sign of life: direct waiters get CollectiveTimeout
};

/// What can be driven: a communicator with outstanding operations.
class Driven {
 public:
  virtual ~Driven() = default;
  /// Under the engine's lock: moves what can be moved, true when anything moved.
  virtual bool advance() = 0;
  /// Under the engine's lock: looks at limits. Called every few milliseconds while somebody waits.
  virtual void checkLimits(std::uint64_t now_ms) = 0;
  virtual bool outstanding() const = 0;
  /// True when a socket may bring what it waits for.
  virtual bool waitsForSockets() const = 0;
  /// Under the engine's lock: drops links, then fails all outstanding operations.
  virtual void fail(const AbortCause& cause) = 0;
};

class Engine {
 public:
  /// `cores_for_all`: every rank of this machine has a core, so spinning robs nobody.
  explicit Engine(bool cores_for_all);
  ~Engine();

  Doorbell& doorbell() { return doorbell_; }
  std::mutex& mutex() { return mutex_; }
  /// epoll instance with all link sockets and the doorbell; the progress thread nests it in its own.
  int dataEvents() const { return data_events_.get(); }
  void addSocket(int fd);

  /// Runs `work` under the lock, soon, on whichever thread drives. From any thread; never blocks.
  void post(std::function<void()> work);

  /// Under the lock: runs what was posted, now.
  void runPosted();

  /// Under the lock: `driven` has something outstanding.
  void activate(std::shared_ptr<Driven> driven);
  /// After activate(), without the lock: makes sure that somebody drives, unless the caller is about to wait.
  void submitted(bool waited_at_once);
  /// Under the lock: moves everything once.
  bool poll();
  /// Blocks until `operation` has ended, driving. Throws CollectiveTimeout after `timeout_ms` (0: never).
  void wait(PendingOperation& operation, std::uint64_t timeout_ms);
  /// The progress thread's turn: drives while anything moves, unless another thread does. Returns at once.
  void driveBriefly();
  /// Under the lock: `operation` has ended; its callback runs as soon as the lock is free.
  void noteEnded(std::shared_ptr<PendingOperation> operation);

  /// Fails everything outstanding of `cause.generation` and what is started later, until another generation is entered.
  /// False when that generation is aborted already, or not the present one. Any thread.
  bool abort(const AbortCause& cause);
  /// Leaves what was aborted behind.
  void enter(Generation generation);
  Generation generation() const { return generation_.load(std::memory_order_acquire); }
  /// Without the lock: runs callbacks of operations that have ended while nobody drove.
  void settle();
  std::optional<AbortCause> aborted() const;
  bool isAborted() const { return aborted_flag_.load(std::memory_order_acquire); }

  /// Set once, before any operation: re-arms the progress thread's view of dataEvents().
  void onArm(std::function<void()> arm) { arm_ = std::move(arm); }
  /// The progress thread's view has fired.
  void disarmed() { armed_.store(false, std::memory_order_release); }
  /// Operations are outstanding: their limits have to be looked at. A hint, read without the lock.
  bool hasOutstanding() const { return outstanding_.load(std::memory_order_relaxed); }
  bool hasPosted() const { return has_posted_.load(std::memory_order_acquire); }

 private:
  class Backoff;
  void drive(std::unique_lock<std::mutex>& lock, PendingOperation& operation, std::uint64_t deadline_ms);
  void take();
  void leave(std::unique_lock<std::mutex>& lock);
  void sleepBriefly(std::unique_lock<std::mutex>& lock, WaitCounters* counters);
  bool waitsForSockets() const;
  void runCallbacks(std::unique_lock<std::mutex>& lock);
  void armProgressThread();

  const bool cores_for_all_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool driven_ = false;  // a thread drives
  std::thread::id driver_;
  struct Crowd {
    int sleep_at_once = 0;  // so many more waits do without yielding
    int penalty = 8;        // makes them more the next time; in short yields that are needed to forget it
  };
  Crowd crowd_;
  int queued_ = 0;  // threads that wait for the driver to end or to leave
  Doorbell doorbell_;
  Descriptor data_events_;
  std::atomic<bool> armed_{false};  // the progress thread's nested epoll will fire
  std::function<void()> arm_;
  std::vector<std::shared_ptr<Driven>> active_;
  std::atomic<bool> outstanding_{false};
  std::vector<std::shared_ptr<PendingOperation>> ended_;
  std::atomic<bool> has_ended_{false};

  mutable std::mutex posted_mutex_;
  std::vector<std::function<void()>> posted_;
  std::atomic<bool> has_posted_{false};

  mutable std::mutex abort_mutex_;
  std::optional<AbortCause> aborted_;
  std::atomic<bool> aborted_flag_{false};
  std::atomic<Generation> generation_{1};
};

}  // namespace trainmover
