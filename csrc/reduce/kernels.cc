// The driver of reductions: walks memory once, in blocks whose partial results stay in the first cache, and calls the
// loops of kernel_set.h on each. Called by runtime/scheduled_operation.cc and the shared-memory path.
#include "reduce/kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "reduce/kernel_set.h"

namespace trainmover {
namespace {

// A block of results; the partial results above it in the tree and the inputs beside it fit into 32 KiB.
constexpr std::size_t kBlockBytes = 2048;
// One for each level of the tree, which has fewer levels than an int has bits.
constexpr int kTemporaries = 31;

const unsigned char* advance(const void* from, std::size_t bytes) {
  return static_cast<const unsigned char*>(from) + bytes;
}
unsigned char* advance(void* from, std::size_t bytes) { return static_cast<unsigned char*>(from) + bytes; }

bool isFloat(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 || type == DataType::kFloat32 ||
         type == DataType::kFloat64;
}

void requireReducible(DataType type, ReduceOp op) {
  if (reducible(type, op)) return;
  throw std::invalid_argument("found reduce operation " + std::to_string(static_cast<int>(op)) + " on element type " +
                              std::to_string(static_cast<int>(type)) +
                              ", expected averages of floats only and bit operations of integers and bools only");
}

/// A partial result: a caller's elements, or accumulators in a temporary.
struct Operand {
  const void* data;
  Form form;
};

/// Combines one block of all inputs.
class BlockReduction {
 public:
  BlockReduction(const OpKernels& kernels, ReductionOrder order, int owner, const void* const* inputs, int size,
                 std::size_t element_bytes)
      : kernels_(kernels), order_(order), owner_(owner), inputs_(inputs), size_(size), element_bytes_(element_bytes) {
    while (width_ <= size_ / 2) width_ *= 2;
  }

  /// Elements begin .. begin + count of the result, in accumulator form, to `out`.
  void run(std::size_t begin, std::size_t count, void* out) {
    begin_ = begin * element_bytes_;
    count_ = count;
    if (order_ == ReductionOrder::kTree) {
      tree(0, 1, 0, out);
    } else {
      ring(out);
    }
  }

 private:
  const void* input(int rank) const { return advance(inputs_[rank], begin_); }

  void pair(void* out, Operand a, Operand b) const {
    kernels_.pair[static_cast<int>(a.form)][static_cast<int>(b.form)](out, a.data, b.data, count_);
  }

  bool fused(FusedKernel kernel, int first, int stride, int inputs, void* out) const {
    if (kernel == nullptr) return false;
    const void* blocks[8];
    for (int i = 0; i < inputs; ++i) blocks[i] = input((first + i * stride) % size_);
    kernel(out, blocks, count_);
    return true;
  }

  /// x[rank] after the steps of distance width/2 ... `distance`: the tree over ranks `rank`, rank + distance, ... The
  /// result lies in `target` (or temporary number `level` if that is null), or is an input itself.
  Operand tree(int rank, int distance, int level, void* target) {
    void* const out = target != nullptr ? target : temporaries_[level];
    const int leaves = width_ / distance;
    if (leaves == 1) {
      if (rank + width_ >= size_) return {input(rank), Form::kElement};
      pair(out, {input(rank), Form::kElement}, {input(rank + width_), Form::kElement});
      return {out, Form::kAccumulator};
    }
    const bool leaves_are_inputs = rank + width_ >= size_;
    if (leaves_are_inputs && ((leaves == 8 && fused(kernels_.tree8, rank, distance, 8, out)) ||
                              (leaves == 4 && fused(kernels_.tree4, rank, distance, 4, out)))) {
      return {out, Form::kAccumulator};
    }
    const Operand left = tree(rank, 2 * distance, level, nullptr);
    const Operand right = tree(rank + distance, 2 * distance, level + 1, nullptr);
    pair(out, left, right);
    return {out, Form::kAccumulator};
  }

  void ring(void* out) {
    const int first = (owner_ + 1) % size_;
    int done = 2;
    if (size_ >= 8 && fused(kernels_.ring8, first, 1, 8, size_ == 8 ? out : temporaries_[0])) {
      done = 8;
    } else if (size_ >= 4 && fused(kernels_.ring4, first, 1, 4, size_ == 4 ? out : temporaries_[0])) {
      done = 4;
    } else {
      pair(size_ == 2 ? out : temporaries_[0], {input(first), Form::kElement},
           {input((first + 1) % size_), Form::kElement});
    }
    for (; done < size_; ++done) {
      pair(done + 1 == size_ ? out : temporaries_[0], {temporaries_[0], Form::kAccumulator},
           {input((first + done) % size_), Form::kElement});
    }
  }

  const OpKernels& kernels_;
  ReductionOrder order_;
  int owner_;
  const void* const* inputs_;
  int size_;
  std::size_t element_bytes_;
  int width_ = 1;  // the largest power of two that is not above size
  std::size_t begin_ = 0;
  std::size_t count_ = 0;
  alignas(64) unsigned char temporaries_[kTemporaries][kBlockBytes];
};

}  // namespace

bool reducible(DataType type, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kAverage:
      return isFloat(type);
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return !isFloat(type);
  }
  return false;
}

const KernelSet& chosenKernels() {
  static const KernelSet& chosen = avx2Kernels() != nullptr ? *avx2Kernels() : baselineKernels();
  return chosen;
}

void reduceAll(const KernelSet& kernels, ReductionOrder order, int owner, const void* const* inputs, int size,
               void* out, std::size_t count, DataType type, ReduceOp op) {
  requireReducible(type, op);
  if (size < 1) throw std::invalid_argument("found " + std::to_string(size) + " inputs to reduce, expected at least 1");
  if (order == ReductionOrder::kRing && (owner < 0 || owner >= size)) {
    throw std::invalid_argument("found owner " + std::to_string(owner) + " of a slice, expected 0 to " +
                                std::to_string(size - 1));
  }
  if (count == 0) return;
  if (size == 1) {
    if (out != inputs[0]) std::memmove(out, inputs[0], count * elementBytes(type));
    return;
  }
  const OpKernels loops = kernels.of_op(type, op);
  BlockReduction reduction(loops, order, owner, inputs, size, elementBytes(type));
  const bool finished_at_once = elementBytes(type) == accumulatorBytes(type);
  const std::size_t block = kBlockBytes / accumulatorBytes(type);
  alignas(64) unsigned char accumulators[kBlockBytes];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t length = std::min(block, count - begin);
    unsigned char* const elements = advance(out, begin * elementBytes(type));
    void* const target = finished_at_once ? elements : accumulators;
    reduction.run(begin, length, target);
    finish(kernels, elements, target, length, type, op, size);
  }
}

void accumulate(const KernelSet& kernels, void* accumulator, const void* source, Form source_form,
                bool accumulator_first, std::size_t count, DataType type, ReduceOp op) {
  requireReducible(type, op);
  const OpKernels loops = kernels.of_op(type, op);
  const auto wide = static_cast<int>(Form::kAccumulator);
  const auto form = static_cast<int>(source_form);
  if (accumulator_first) {
    loops.pair[wide][form](accumulator, accumulator, source, count);
  } else {
    loops.pair[form][wide](accumulator, source, accumulator, count);
  }
}

void widen(const KernelSet& kernels, void* accumulators, const void* elements, std::size_t count, DataType type) {
  const TypeKernels loops = kernels.of_type(type);
  if (loops.widen != nullptr) {
    loops.widen(accumulators, elements, count);
  } else if (count > 0) {
    std::memcpy(accumulators, elements, count * elementBytes(type));
  }
}

void finish(const KernelSet& kernels, void* elements, const void* accumulators, std::size_t count, DataType type,
            ReduceOp op, int size) {
  const TypeKernels loops = kernels.of_type(type);
  if (op == ReduceOp::kAverage) {
    requireReducible(type, op);
    loops.divide_and_finish(elements, accumulators, count, size);
  } else if (loops.finish != nullptr) {
    loops.finish(elements, accumulators, count);
  } else if (elements != accumulators && count > 0) {
    std::memmove(elements, accumulators, count * elementBytes(type));
  }
}

void reduceAll(ReductionOrder order, int owner, const void* const* inputs, int size, void* out, std::size_t count,
               DataType type, ReduceOp op) {
  reduceAll(chosenKernels(), order, owner, inputs, size, out, count, type, op);
}

void accumulate(void* accumulator, const void* source, Form source_form, bool accumulator_first, std::size_t count,
                DataType type, ReduceOp op) {
  accumulate(chosenKernels(), accumulator, source, source_form, accumulator_first, count, type, op);
}

void widen(void* accumulators, const void* elements, std::size_t count, DataType type) {
  widen(chosenKernels(), accumulators, elements, count, type);
}

void finish(void* elements, const void* accumulators, std::size_t count, DataType type, ReduceOp op, int size) {
  finish(chosenKernels(), elements, accumulators, count, type, op, size);
}

}  // namespace trainmover
