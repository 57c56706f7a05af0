// Recursive halving: after log2 rounds each rank of the reduction tree holds its own block of the vector, combined in
// the order kTree. Used by all_reduce.cc and reduce_scatter.cc. Internal to collectives/.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

// Tags of a segment: 0 ... 30 are the halving's, then these.
constexpr std::uint64_t kFoldTag = 31;
constexpr std::uint64_t kUnfoldTag = 32;
constexpr std::uint64_t kTagsPerSegment = 64;

constexpr std::size_t kDistancesMax = 31;

/// Where one segment of the vector lies, and what is ready of it. `bounds[i]` is where block i begins, in elements from
/// the segment's first; it has an entry more than there are ranks in the tree.
struct HalvingPlan {
  std::vector<std::size_t> bounds;
  Region accumulators;     // of the segment. Before: the half that is kept, or all of it when folded
  Region elements;         // own contribution, same order; used, for the half that is given, unless folded
  StepId kept = kNoStep;   // after which the accumulators are there
  StepId given = kNoStep;  // after which what is given first may be sent
  StepId free = kNoStep;   // after which the buffers may be written
  Region buffers[2];       // for what comes in, taking turns
  std::uint64_t first_tag = 0;
};

struct HalvingResult {
  HalvingResult() { sent.fill(kNoStep); }
  StepId ready = kNoStep;                  // after which block `rank` is combined, in accumulators
  std::array<StepId, kDistancesMax> sent;  // [k]: after which what was given at distance 2^k has left
};

/// Blocks that `rank` keeps, and those it gives, at `distance`: `distance` many from the one returned.
inline int blocksKept(int rank, int distance) { return rank & ~(distance - 1); }
inline int blocksGiven(int rank, int distance) { return blocksKept(rank ^ distance, distance); }

/// `count` blocks from `first`, in elements.
inline Slice blocksAt(const std::vector<std::size_t>& bounds, int first, int count) {
  return Slice{bounds[static_cast<std::size_t>(first)], bounds[static_cast<std::size_t>(first + count)]};
}

/// Bytes that buffer `turn` of a plan with these bounds needs.
std::size_t halvingBufferBytes(const ReductionTree& tree, int rank, const std::vector<std::size_t>& bounds, int turn,
                               std::size_t accumulator_bytes);

/// Uses the tags first_tag + 0 ... first_tag + kDistancesMax - 1.
HalvingResult halve(ScheduleBuilder& builder, const ReductionTree& tree, int rank, const HalvingPlan& plan);

}  // namespace trainmover
