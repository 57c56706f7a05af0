// Which loops there are, and for which processor: the seam between the driver (kernels.cc) and the vector code that is
// compiled once for each instruction set (kernels_baseline.cc, kernels_avx2.cc). Used by those and by their test.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "reduce/kernels.h"

namespace trainmover {

/// out = a (x) b; `out` in accumulator form. `out` may be the same memory as an operand in accumulator form.
using PairKernel = void (*)(void* out, const void* a, const void* b, std::size_t count);
/// out = a fixed number of inputs in one order; inputs in element form, `out` in accumulator form.
using FusedKernel = void (*)(void* out, const void* const* inputs, std::size_t count);

/// The loops of one (type, operation).
struct OpKernels {
  PairKernel pair[2][2] = {};  // by form of a, of b
  // Four and eight inputs in one sweep without temporaries; null where it isn't worth the code.
  FusedKernel tree4 = nullptr;
  FusedKernel tree8 = nullptr;
  FusedKernel ring4 = nullptr;
  FusedKernel ring8 = nullptr;
};

/// The loops of one type.
struct TypeKernels {
  void (*widen)(void* accumulators, const void* elements, std::size_t count) = nullptr;
  void (*finish)(void* elements, const void* accumulators, std::size_t count) = nullptr;
  void (*divide_and_finish)(void* elements, const void* accumulators, std::size_t count, int divisor) = nullptr;
};

struct KernelSet {
  OpKernels (*of_op)(DataType type, ReduceOp op);  // all null where not reducible()
  TypeKernels (*of_type)(DataType type);           // null pointers where the conversion is a plain copy
};

/// For any processor.
const KernelSet& baselineKernels();
/// Needs AVX2 and F16C; null where this processor has them not, or the compiler can't emit them.
const KernelSet* avx2Kernels();
/// The best set for this processor.
const KernelSet& chosenKernels();

/// As their namesakes in kernels.h, with the loops of `kernels`.
void reduceAll(const KernelSet& kernels, ReductionOrder order, int owner, const void* const* inputs, int size,
               void* out, std::size_t count, DataType type, ReduceOp op);
void accumulate(const KernelSet& kernels, void* accumulator, const void* source, Form source_form,
                bool accumulator_first, std::size_t count, DataType type, ReduceOp op);
void widen(const KernelSet& kernels, void* accumulators, const void* elements, std::size_t count, DataType type);
void finish(const KernelSet& kernels, void* elements, const void* accumulators, std::size_t count, DataType type,
            ReduceOp op, int size);

}  // namespace trainmover
