// The one order in which the contributions of a group are combined, for every path that reduces: links, shared memory,
// later queue pairs and kernels. A function of size and bytes alone, so the bits never depend on where ranks run.
#pragma once

#include <cstddef>
#include <vector>

namespace trainmover {

enum class ReductionOrder {
  /// Let P be the largest power of two <= size. First x[r] = x[r] (x) x[r + P] for the ranks r + P < size; then for
  /// d = P/2 ... 1: x[r] = x[r] (x) x[r + d] for r < d. Result x[0]. What doubling and halving over links compute.
  kTree,
  /// For the slice owned by rank s: x[s+1] (x) x[s+2] (x) ... (x) x[s], ranks modulo size, left to right. What a ring
  /// computes.
  kRing,
};

/// Vectors of at least this many bytes per rank (whole vector / size) go round the ring; smaller ones up the tree.
constexpr std::size_t kRingBytesPerRank = std::size_t{64} << 10;

/// `bytes`: of the whole vector in element form. Reduce-scatter: of all pieces together. kReduce is always kTree.
ReductionOrder reductionOrder(std::size_t bytes, int size);

/// Half-open range of elements that rank `owner` owns of a vector of `count` that is cut evenly for `size` ranks:
/// every part but the last holds ceil(count / size) rounded up to 16 elements; later parts may be short or empty.
struct Slice {
  std::size_t begin = 0;
  std::size_t end = 0;
};
Slice sliceOf(std::size_t count, int size, int owner);

}  // namespace trainmover
