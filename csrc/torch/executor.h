// Where an operation is run from: the seam between c10d's tensors, whose writers may still be queued on a stream, and
// communicators, which know memory only. CPU tensors have no stream, so the one executor there is now starts at once.
// Called by backend*.cc and work.cc.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>

#include "runtime/communicator.h"
#include "runtime/operation.h"

namespace trainmover {

class Executor {
 public:
  virtual ~Executor() = default;

  /// Notes the point of the caller's current stream at which the inputs of the next operation are written.
  virtual void recordReady() = 0;

  /// Starts the operation, once the noted point is reached. Never blocks.
  virtual std::shared_ptr<Operation> enqueue(Communicator& communicator, const CollectiveCall& call) = 0;
  virtual std::shared_ptr<Operation> enqueueSend(Communicator& communicator, Buffer buffer, int peer,
                                                 std::int64_t tag) = 0;
  virtual std::shared_ptr<Operation> enqueueReceive(Communicator& communicator, Buffer buffer, int peer,
                                                    std::int64_t tag) = 0;

  /// Makes the caller's current stream wait for `operation`. On the CPU the stream is the calling thread: it blocks,
  /// and the operation's error is rethrown.
  virtual void makeCurrentStreamWait(Operation& operation, std::chrono::milliseconds timeout) = 0;
};

/// The executor for tensors on `device`. Throws c10::NotImplementedError for all but the CPU.
Executor& executorFor(c10::Device device);

}  // namespace trainmover
