// See tensors.h and executor.h.
#include "torch/tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "reduce/kernels.h"
#include "torch/executor.h"

namespace trainmover {
namespace {

class CpuExecutor final : public Executor {
 public:
  void recordReady() override {}

  std::shared_ptr<Operation> enqueue(Communicator& communicator, const CollectiveCall& call) override {
    return communicator.start(call);
  }

  std::shared_ptr<Operation> enqueueSend(Communicator& communicator, Buffer buffer, int peer,
                                         std::int64_t tag) override {
    return communicator.send(buffer, peer, tag, std::chrono::milliseconds{0});
  }

  std::shared_ptr<Operation> enqueueReceive(Communicator& communicator, Buffer buffer, int peer,
                                            std::int64_t tag) override {
    return communicator.receive(buffer, peer, tag, std::chrono::milliseconds{0});
  }

  void makeCurrentStreamWait(Operation& operation, std::chrono::milliseconds timeout) override {
    if (!operation.finished()) {
      operation.wait(timeout);
    } else if (std::exception_ptr error = operation.error()) {
      std::rethrow_exception(error);
    }
  }
};

const char* nameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kAverage:
      return "AVG";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBitAnd:
      return "BAND";
    case ReduceOp::kBitOr:
      return "BOR";
    case ReduceOp::kBitXor:
      return "BXOR";
  }
  return "?";
}

DataType requireReducible(DataType type, at::ScalarType scalar, ReduceOp op) {
  TORCH_CHECK_VALUE(
      reducible(type, op), "found ", nameOf(op), " of ", scalar,
      " elements, which is not defined: BAND, BOR and BXOR are for integers and bool, AVG is for floating "
      "point; reduce another type or with another operation");
  return type;
}

DataType complexReductionType(DataType part, at::ScalarType scalar, ReduceOp op) {
  TORCH_CHECK_VALUE(op == ReduceOp::kSum || op == ReduceOp::kAverage, "found ", nameOf(op), " of ", scalar,
                    " elements; complex numbers can be reduced with SUM and AVG only");
  return part;
}

[[noreturn]] void throwNotReducible(at::ScalarType type) {
  C10_THROW_ERROR(TypeError, c10::str("found a reduction of ", type,
                                      " elements; expected bool, an integer of 8 to 64 bits, float16, bfloat16, "
                                      "float32, float64, complex32, complex64 or complex128: convert before the call. "
                                      "(Operations that only move data take every type.)"));
}

}  // namespace

Executor& executorFor(c10::Device device) {
  static CpuExecutor cpu;
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), "backend trainmover: found a tensor on ", device,
                              ", but this build communicates CPU tensors only; move the tensor to the CPU, or run with "
                              "--distributed-backend nccl");
  return cpu;
}

DataType reductionType(at::ScalarType type, ReduceOp op) {
  switch (type) {
    case at::kChar:
      return requireReducible(DataType::kInt8, type, op);
    case at::kByte:
      return requireReducible(DataType::kUInt8, type, op);
    case at::kShort:
      return requireReducible(DataType::kInt16, type, op);
    case at::ScalarType::UInt16:
      return requireReducible(DataType::kUInt16, type, op);
    case at::kInt:
      return requireReducible(DataType::kInt32, type, op);
    case at::ScalarType::UInt32:
      return requireReducible(DataType::kUInt32, type, op);
    case at::kLong:
      return requireReducible(DataType::kInt64, type, op);
    case at::ScalarType::UInt64:
      return requireReducible(DataType::kUInt64, type, op);
    case at::kBool:
      return requireReducible(DataType::kBool, type, op);
    case at::kHalf:
      return requireReducible(DataType::kFloat16, type, op);
    case at::kBFloat16:
      return requireReducible(DataType::kBFloat16, type, op);
    case at::kFloat:
      return requireReducible(DataType::kFloat32, type, op);
    case at::kDouble:
      return requireReducible(DataType::kFloat64, type, op);
    case at::kComplexHalf:
      return complexReductionType(DataType::kFloat16, type, op);
    case at::kComplexFloat:
      return complexReductionType(DataType::kFloat32, type, op);
    case at::kComplexDouble:
      return complexReductionType(DataType::kFloat64, type, op);
    default:
      throwNotReducible(type);
  }
}

ReduceOp reduceOperation(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    default:
      break;
  }
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str("backend trainmover: found reduce operation number ", static_cast<int>(op.op_),
               " (PREMUL_SUM is one of NCCL's own); expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR: "
               "multiply before the call"));
}

bool isPlain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

namespace {

void requireUsable(const at::Tensor& tensor) {
  executorFor(tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "backend trainmover: found a tensor of layout ", tensor.layout(),
                    "; expected a dense one: call to_dense() first");
}

at::Tensor emptyLike(const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }

}  // namespace

Buffer Operands::input(const at::Tensor& tensor) {
  requireUsable(tensor);
  if (isPlain(tensor)) {
    held_.push_back(tensor);
  } else {
    at::AutoDispatchBelowAutograd below_autograd;
    held_.push_back(emptyLike(tensor).copy_(tensor));
  }
  return memoryOf(held_.back());
}

Buffer Operands::output(const at::Tensor& tensor) {
  requireUsable(tensor);
  results_.push_back(tensor);
  if (isPlain(tensor)) {
    return memoryOf(tensor);
  }
  at::AutoDispatchBelowAutograd below_autograd;
  copy_backs_.push_back({emptyLike(tensor), tensor});
  return memoryOf(copy_backs_.back().source);
}

Buffer Operands::inputAndOutput(const at::Tensor& tensor) {
  const std::size_t copies = copy_backs_.size();
  const Buffer buffer = output(tensor);
  if (copy_backs_.size() > copies) {
    at::AutoDispatchBelowAutograd below_autograd;
    copy_backs_.back().source.copy_(tensor);
  }
  return buffer;
}

void Operands::copyBack() const {
  at::AutoDispatchBelowAutograd below_autograd;
  for (const CopyBack& copy : copy_backs_) {
    copy.target.copy_(copy.source);
  }
}

}  // namespace trainmover
