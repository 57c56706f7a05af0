// c10d's handle on what was started: OperationWork for one operation, BatchWork for several that were started together.
// Made by backend*.cc, waited for by whoever called torch.distributed.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "runtime/operation.h"
#include "torch/data_plane.h"
#include "torch/executor.h"
#include "torch/tensors.h"

namespace trainmover {

/// The two futures that c10d may ask of a work, made when it asks. Not thread-safe by itself.
struct WorkFutures {
  c10::intrusive_ptr<c10::ivalue::Future> value;   // List[Tensor], or the error
  c10::intrusive_ptr<c10::ivalue::Future> result;  // c10d::WorkResult as a number, never an error
};

class OperationWork final : public c10d::Work {
 public:
  OperationWork(std::shared_ptr<OpenGroup> group, Executor& executor, c10d::OpType type,
                std::shared_ptr<Operation> operation, Operands&& operands);
  /// The memory stays lent until the operation ends, even when nobody holds the work any more.
  ~OperationWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  /// Blocks; not to be called with the GIL held (torch's bindings release it).
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  /// Aborts the collectives of the process: an operation that others take part in cannot end alone.
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  Operation& operation() const { return *operation_; }
  /// Once the operation has ended: fills outputs that are not contiguous. Idempotent, from any thread.
  void settle();

 private:
  const std::shared_ptr<OpenGroup> group_;
  Executor& executor_;
  const std::shared_ptr<Operation> operation_;
  Operands operands_;
  const std::uint64_t sequence_;
  std::atomic<bool> settled_;
  WorkFutures futures_;  // under c10d::Work::mutex_
};

class BatchWork final : public c10d::Work {
 public:
  BatchWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<OperationWork>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

 private:
  /// Runs `callback` once, on the thread that ends the last operation.
  void whenAllFinished(std::function<void()> callback);

  const std::vector<c10::intrusive_ptr<OperationWork>> works_;
  WorkFutures futures_;
};

}  // namespace trainmover
