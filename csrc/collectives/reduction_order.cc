// See reduction_order.h. Called by the builders here, by the shared-memory path and by its tests.
#include "collectives/reduction_order.h"

#include <algorithm>

namespace trainmover {

namespace {
/// Slices begin at multiples of this many elements, so that vector units and cache lines are not cut in two.
constexpr std::size_t kSliceAlignment = 16;
}  // namespace

ReductionOrder reductionOrder(std::size_t bytes, int size) {
  return bytes < kRingBytesPerRank * static_cast<std::size_t>(size) ? ReductionOrder::kTree : ReductionOrder::kRing;
}

Slice sliceOf(std::size_t count, int size, int owner) {
  const std::size_t parts = static_cast<std::size_t>(size);
  std::size_t part = count / parts + (count % parts != 0);
  part = (part + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
  const std::size_t begin = std::min(count, part * static_cast<std::size_t>(owner));
  return Slice{begin, std::min(count, begin + part)};
}

}  // namespace trainmover
