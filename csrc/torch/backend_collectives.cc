// The collectives of Backend: which memory of which tensors is the input and output of which operation. See backend.h.
#include "torch/backend.h"
#include "torch/parts.h"

namespace trainmover {
namespace {

using c10d::OpType;

const at::Tensor& onlyTensor(const char* operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, ": found ", tensors.size(),
                    " tensors; expected one: a rank has one tensor a call");
  return tensors.front();
}

const std::vector<at::Tensor>& onlyList(const char* operation, const std::vector<std::vector<at::Tensor>>& lists,
                                        int size) {
  TORCH_CHECK_VALUE(lists.size() == 1 && static_cast<int>(lists.front().size()) == size, operation,
                    ": expected one list of ", size, " tensors, one a rank; found ", lists.size(), " lists",
                    lists.empty() ? std::string() : ", the first of " + std::to_string(lists.front().size()));
  return lists.front();
}

void requireEqualTypes(const char* operation, const at::Tensor& input, const at::Tensor& output) {
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(), operation, ": found an input of ", input.scalar_type(),
                   " and an output of ", output.scalar_type(), "; expected the same type");
}

void requireRatio(const char* operation, const at::Tensor& small, const at::Tensor& large, int size) {
  TORCH_CHECK_VALUE(small.numel() * size == large.numel(), operation, ": found ", small.numel(), " and ", large.numel(),
                    " elements; expected the second to be ", size, " (ranks) times the first");
}

void requireEqualCounts(const char* operation, std::size_t inputs, std::size_t outputs) {
  TORCH_CHECK_VALUE(inputs == outputs, operation, ": found ", inputs, " inputs and ", outputs,
                    " outputs; expected as many of each");
}

void setReduction(CollectiveCall& call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  call.op = reduceOperation(op);
  call.dtype = reductionType(tensor.scalar_type(), call.op);
}

/// Cuts the rows of `tensor`, which lies at `whole`, by `splits`; evenly when there are none.
void appendRows(std::vector<Buffer>& parts, const char* which, const at::Tensor& tensor, Buffer whole,
                const std::vector<int64_t>& splits, int size) {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "all_to_all_single: found an ", which, " of ", rows,
                      " rows and no split sizes; expected a multiple of the ", size, " ranks");
    appendEqualParts(parts, whole, size);
    return;
  }
  int64_t sum = 0;
  bool negative = false;
  for (const int64_t split : splits) {
    sum += split;
    negative = negative || split < 0;
  }
  TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size && sum == rows && !negative, "all_to_all_single: found ",
                    splits.size(), " split sizes of the ", which, " with sum ", sum, "; expected ", size,
                    ", none negative, with sum ", rows, ", the size of dimension 0");
  const std::size_t row_bytes = rows == 0 ? 0 : whole.bytes / static_cast<std::size_t>(rows);
  auto* at = static_cast<char*>(whole.data);
  for (const int64_t split : splits) {
    const std::size_t bytes = row_bytes * static_cast<std::size_t>(split);
    parts.push_back(Buffer{at, bytes});
    at += bytes;
  }
}

}  // namespace

Backend::WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = onlyTensor("broadcast", tensors);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kBroadcast, options);
  call.root = static_cast<int>(options.rootRank);
  call.outputs = {operands.inputAndOutput(tensor)};
  return start(tensor.device(), OpType::BROADCAST, call, std::move(operands));
}

Backend::WorkOfOne Backend::startAllReduce(at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kAllReduce, options);
  setReduction(call, tensor, options.reduceOp);
  call.outputs = {operands.inputAndOutput(tensor)};
  return start(tensor.device(), OpType::ALLREDUCE, call, std::move(operands));
}

Backend::WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  onlyTensor("all_reduce", tensors);
  return startAllReduce(tensors.front(), options);
}

Backend::WorkPointer Backend::allreduce_sparse(Tensors& /*tensors*/, const c10d::AllreduceOptions& /*options*/) {
  C10_THROW_ERROR(NotImplementedError,
                  "backend trainmover: found an all_reduce of a sparse tensor; expected a dense one: call to_dense() "
                  "first");
}

Backend::WorkPointer Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<WorkOfOne> works;
  for (at::Tensor& tensor : tensors) {
    works.push_back(startAllReduce(tensor, options));
  }
  return batch(OpType::ALLREDUCE_COALESCED, std::move(works));
}

Backend::WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = onlyTensor("reduce", tensors);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kReduce, options);
  setReduction(call, tensor, options.reduceOp);
  call.root = static_cast<int>(options.rootRank);
  if (call.root == getRank()) {
    const Buffer buffer = operands.inputAndOutput(tensor);
    call.inputs = {buffer};
    call.outputs = {buffer};
  } else {
    call.inputs = {operands.input(tensor)};
  }
  return start(tensor.device(), OpType::REDUCE, call, std::move(operands));
}

Backend::WorkPointer Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& input = onlyTensor("all_gather", inputs);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kAllGather, options);
  call.inputs = {operands.input(input)};
  for (const at::Tensor& output : onlyList("all_gather", outputs, getSize())) {
    requireEqualTypes("all_gather", input, output);
    call.outputs.push_back(operands.output(output));
  }
  return start(input.device(), OpType::ALLGATHER, call, std::move(operands));
}

Backend::WorkOfOne Backend::startAllGather(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) {
  requireEqualTypes("all_gather_into_tensor", input, output);
  requireRatio("all_gather_into_tensor", input, output, getSize());
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kAllGather, options);
  call.inputs = {operands.input(input)};
  appendEqualParts(call.outputs, operands.output(output), getSize());
  return start(input.device(), OpType::_ALLGATHER_BASE, call, std::move(operands));
}

Backend::WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return startAllGather(output, input, options);
}

Backend::WorkPointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  requireEqualCounts("all_gather_into_tensor, coalesced", inputs.size(), outputs.size());
  std::vector<WorkOfOne> works;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    works.push_back(startAllGather(outputs[index], inputs[index], options));
  }
  return batch(OpType::COALESCED, std::move(works));
}

// `outputs[r][i]` is what rank r gives as `inputs[i]`.
Backend::WorkPointer Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  requireEqualCounts("all_gather_coalesced: ranks, lists of outputs", static_cast<std::size_t>(getSize()),
                     outputs.size());
  std::vector<WorkOfOne> works;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    Operands operands;
    CollectiveCall call = callOf(CollectiveKind::kAllGather, options);
    call.inputs = {operands.input(inputs[index])};
    for (const Tensors& of_rank : outputs) {
      requireEqualCounts("all_gather_coalesced", inputs.size(), of_rank.size());
      requireEqualTypes("all_gather_coalesced", inputs[index], of_rank[index]);
      call.outputs.push_back(operands.output(of_rank[index]));
    }
    works.push_back(start(inputs[index].device(), OpType::ALLGATHER_COALESCED, call, std::move(operands)));
  }
  return batch(OpType::ALLGATHER_COALESCED, std::move(works));
}

Backend::WorkPointer Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = onlyTensor("gather", inputs);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kGather, options);
  call.root = static_cast<int>(options.rootRank);
  call.inputs = {operands.input(input)};
  if (call.root == getRank()) {
    for (const at::Tensor& output : onlyList("gather", outputs, getSize())) {
      requireEqualTypes("gather", input, output);
      requireRatio("gather", input, output, 1);
      call.outputs.push_back(operands.output(output));
    }
  }
  return start(input.device(), OpType::GATHER, call, std::move(operands));
}

Backend::WorkPointer Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = onlyTensor("scatter", outputs);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kScatter, options);
  call.root = static_cast<int>(options.rootRank);
  if (call.root == getRank()) {
    for (const at::Tensor& input : onlyList("scatter", inputs, getSize())) {
      requireEqualTypes("scatter", input, output);
      requireRatio("scatter", input, output, 1);
      call.inputs.push_back(operands.input(input));
    }
  }
  call.outputs = {operands.output(output)};
  return start(output.device(), OpType::SCATTER, call, std::move(operands));
}

Backend::WorkPointer Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = onlyTensor("reduce_scatter", outputs);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kReduceScatter, options);
  setReduction(call, output, options.reduceOp);
  for (const at::Tensor& input : onlyList("reduce_scatter", inputs, getSize())) {
    requireEqualTypes("reduce_scatter", input, output);
    call.inputs.push_back(operands.input(input));
  }
  call.outputs = {operands.output(output)};
  return start(output.device(), OpType::REDUCE_SCATTER, call, std::move(operands));
}

Backend::WorkOfOne Backend::startReduceScatter(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  requireEqualTypes("reduce_scatter_tensor", input, output);
  requireRatio("reduce_scatter_tensor", output, input, getSize());
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kReduceScatter, options);
  setReduction(call, output, options.reduceOp);
  appendEqualParts(call.inputs, operands.input(input), getSize());
  call.outputs = {operands.output(output)};
  return start(output.device(), OpType::_REDUCE_SCATTER_BASE, call, std::move(operands));
}

Backend::WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return startReduceScatter(output, input, options);
}

Backend::WorkPointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::ReduceScatterOptions& options) {
  requireEqualCounts("reduce_scatter_tensor, coalesced", inputs.size(), outputs.size());
  std::vector<WorkOfOne> works;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    works.push_back(startReduceScatter(outputs[index], inputs[index], options));
  }
  return batch(OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(works));
}

Backend::WorkPointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  requireEqualTypes("all_to_all_single", input, output);
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kAllToAll, options);
  appendRows(call.inputs, "input", input, operands.input(input), input_splits, getSize());
  appendRows(call.outputs, "output", output, operands.output(output), output_splits, getSize());
  return start(input.device(), OpType::ALLTOALL_BASE, call, std::move(operands));
}

Backend::WorkPointer Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  requireEqualCounts("all_to_all: ranks, inputs", static_cast<std::size_t>(getSize()), inputs.size());
  requireEqualCounts("all_to_all", inputs.size(), outputs.size());
  Operands operands;
  CollectiveCall call = callOf(CollectiveKind::kAllToAll, options);
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    requireEqualTypes("all_to_all", inputs[index], outputs[index]);
    call.inputs.push_back(operands.input(inputs[index]));
    call.outputs.push_back(operands.output(outputs[index]));
  }
  return start(inputs.front().device(), OpType::ALLTOALL, call, std::move(operands));
}

Backend::WorkPointer Backend::barrier(const c10d::BarrierOptions& options) {
  return start(c10::Device(c10::kCPU), OpType::BARRIER, callOf(CollectiveKind::kBarrier, options), Operands());
}

}  // namespace trainmover
