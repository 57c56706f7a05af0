// The arithmetic of reductions. Pure, single-threaded, vectorised; the same bits for every vector width: elements are
// combined one by one in the order given, never contracted (-ffp-contract=off) and never reassociated.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "collectives/reduction_order.h"

namespace trainmover {

/// True when `op` is defined for `type`: bit operations for integers and bool only; kAverage for floats only.
bool reducible(DataType type, ReduceOp op);

/// out = all of inputs[0 .. size) in `order` (for kRing the slice is that of `owner`), finished: 16-bit floats are
/// combined in fp32 and rounded once; kAverage divides by `size`. Inputs and `out` in element form, `count` elements
/// each, any alignment. `out` may be the same memory as any one input.
void reduceAll(ReductionOrder order, int owner, const void* const* inputs, int size, void* out, std::size_t count,
               DataType type, ReduceOp op);

/// accumulator = accumulator (x) source, or source (x) accumulator unless `accumulator_first`. `accumulator` is in
/// accumulator form, `source` in `source_form`; they don't overlap.
void accumulate(void* accumulator, const void* source, Form source_form, bool accumulator_first, std::size_t count,
                DataType type, ReduceOp op);

/// Elements -> accumulators. A plain copy for all but 16-bit floats. Memory doesn't overlap.
void widen(void* accumulators, const void* elements, std::size_t count, DataType type);

/// Accumulators -> elements: rounds to nearest even, and divides by `size` for kAverage. In place allowed (same
/// address) also where sizes differ.
void finish(void* elements, const void* accumulators, std::size_t count, DataType type, ReduceOp op, int size);

}  // namespace trainmover
