// An operation as the engine drives it: base of scheduled, shared-memory and point-to-point operations.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/flight_recorder.h"
#include "runtime/operation.h"
#include "runtime/operation_trace.h"
#include "runtime/traffic.h"

namespace trainmover {

class Engine;

class PendingOperation : public Operation, public std::enable_shared_from_this<PendingOperation> {
 public:
  explicit PendingOperation(Engine& engine) : engine_(engine) {}

  void wait(std::chrono::milliseconds timeout) override;
  void whenFinished(std::function<void()> callback) override;

  /// Under the engine's lock: moves on; true when it has ended well. Throws what it failed with.
  virtual bool advance() = 0;
  /// Under the engine's lock: true when it cannot end without something from `group_rank` itself.
  virtual bool waitsFor(int group_rank) const = 0;

  /// Under the engine's lock: true when it works on memory that `group_rank` has to keep up.
  virtual bool needsMemoryOf(int /*group_rank*/) const { return false; }
  /// Under the engine's lock: bytes of memory it holds besides its caller's.
  virtual std::size_t scratchBytes() const { return 0; }
  /// Under the engine's lock, every few milliseconds while somebody waits: throws what only a slow look finds.
  virtual void inspect() {}
  /// True when the last advance() changed anything.
  bool moved = false;

  /// Under the engine's lock, once: ends with `error`, or well when it is null.
  void end(std::exception_ptr error);
  /// Ends before anybody could wait (isolated mode, nothing to do).
  void endAtOnce() { finished_.store(true, std::memory_order_release); }
  std::vector<std::function<void()>> takeCallbacks() { return std::exchange(callbacks_, {}); }

  std::uint64_t deadline_ms = 0;
  bool sleeps = false;  // who waits for it does so at once
  std::string description;
  std::uint64_t record = ~std::uint64_t{0};
  FlightRecorder* recorder = nullptr;
  std::unique_ptr<TracedOperation> traced;  // null: nobody asked
  std::shared_ptr<WaitCounters> waits;      // its communicator's; null where nobody counts

 protected:
  Engine& engine_;

 private:
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace trainmover
