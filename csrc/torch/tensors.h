// From tensors to what a communicator takes: memory, element types, reduce operations. Also what must outlive a call:
// tensors that lend their memory, and copies for tensors that are not contiguous. Called by backend*.cc and
// communicator_object.cc.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "base/types.h"
#include "runtime/communicator.h"

namespace trainmover {

/// Element type and operation for a reduction of `type`, or an error that names what can be reduced. Complex numbers
/// are summed and averaged as pairs of real ones, which is what their bytes are.
DataType reductionType(at::ScalarType type, ReduceOp op);
ReduceOp reduceOperation(const c10d::ReduceOp& op);

/// Whether the elements lie in memory in order, as they are (no lazy conjugation or negation).
bool isPlain(const at::Tensor& tensor);

/// The memory of a plain tensor.
inline Buffer memoryOf(const at::Tensor& tensor) { return Buffer{tensor.data_ptr(), tensor.nbytes()}; }

/// `source`, contiguous, takes the place of `target` during an operation; its elements are copied there at the end.
struct CopyBack {
  at::Tensor source;
  at::Tensor target;
};

/// The tensors of one call. Input, output and both in one, each lends its memory directly or through a copy.
class Operands {
 public:
  Buffer input(const at::Tensor& tensor);
  Buffer output(const at::Tensor& tensor);
  Buffer inputAndOutput(const at::Tensor& tensor);

  /// Runs the copies. For a thread that may touch the targets: the waiter, or whoever completes the future.
  void copyBack() const;
  bool copiesBack() const { return !copy_backs_.empty(); }
  const std::vector<at::Tensor>& results() const { return results_; }

 private:
  c10::SmallVector<at::Tensor, 2> held_;
  c10::SmallVector<CopyBack, 1> copy_backs_;
  std::vector<at::Tensor> results_;  // outputs, as the caller knows them
};

}  // namespace trainmover
