// One outstanding operation, as its caller holds it.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>

namespace trainmover {

class Operation {
 public:
  virtual ~Operation() = default;

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  /// The error it ended with; null while it runs and when it succeeded.
  std::exception_ptr error() const { return finished() ? error_ : nullptr; }
  /// Point-to-point receives: group rank of the sender, once finished.
  int sourceRank() const { return source_rank_; }
  /// Bytes that a receive got, once finished.
  std::size_t receivedBytes() const { return received_bytes_; }

  /// Makes progress on everything until this operation ends; blocks. Rethrows its error. `timeout` <= 0: as long as the
  /// operation's own time-out. When the wait (not the operation) runs out: CollectiveTimeout, and the operation goes
  /// on.
  virtual void wait(std::chrono::milliseconds timeout = std::chrono::milliseconds{0}) = 0;

  /// Runs `callback` when this has ended: now, if it has, else on whichever thread ends it, with no lock held.
  virtual void whenFinished(std::function<void()> callback) = 0;

 protected:
  std::atomic<bool> finished_{false};
  std::exception_ptr error_;
  int source_rank_ = -1;
  std::size_t received_bytes_ = 0;
};

}  // namespace trainmover
