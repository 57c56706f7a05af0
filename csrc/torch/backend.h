// The c10d backend "trainmover": turns torch.distributed's calls into operations of a communicator. One object a group,
// made by bindings.cc. What a call needs of the tensors is in tensors.h, what it returns in work.h. The methods are in
// backend.cc (life, time-outs, coalescing), backend_collectives.cc and backend_point_to_point.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "torch/data_plane.h"
#include "torch/executor.h"
#include "torch/tensors.h"
#include "torch/work.h"

namespace trainmover {

class Backend final : public c10d::Backend {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  Backend(std::shared_ptr<OpenGroup> group, const std::vector<int>& global_ranks, std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "trainmover"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return false; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPointer endCoalescing() override;
  /// Sequence numbers count from 0 on every rank: there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override;
  WorkPointer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

 private:
  using WorkOfOne = c10::intrusive_ptr<OperationWork>;

  Communicator& communicator() { return group_->communicator(); }
  /// Starts `call` from the stream of `device`.
  WorkOfOne start(c10::Device device, c10d::OpType type, const CollectiveCall& call, Operands&& operands);
  WorkOfOne finishStart(Executor& executor, c10d::OpType type, std::shared_ptr<Operation> operation,
                        Operands&& operands);
  WorkOfOne receiveFrom(Tensors& tensors, int from, int tag, c10d::OpType type);
  WorkOfOne startAllReduce(at::Tensor& tensor, const c10d::AllreduceOptions& options);
  WorkOfOne startAllGather(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options);
  WorkOfOne startReduceScatter(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options);
  WorkPointer batch(c10d::OpType type, std::vector<WorkOfOne> works);

  const std::shared_ptr<OpenGroup> group_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<bool> coalescing_{false};
  std::mutex coalesced_mutex_;
  std::vector<WorkOfOne> coalesced_;
};

/// A call of `kind` with the time-out and the haste that `options` ask for; any of c10d's option structs.
template <typename AnyOptions>
CollectiveCall callOf(CollectiveKind kind, const AnyOptions& options) {
  CollectiveCall call;
  call.kind = kind;
  call.timeout = options.timeout > std::chrono::milliseconds{0} ? options.timeout : std::chrono::milliseconds{0};
  call.waited_at_once = !options.asyncOp;
  return call;
}

}  // namespace trainmover
