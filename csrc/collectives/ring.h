// The ring: slice s of a vector goes from rank to rank + 1, from s + 1 to s while it is summed (ReductionOrder::kRing),
// from s all the way round once it is known. Slices are cut into chunks; the n-th chunks of all slices are *column* n,
// and columns don't wait for each other, so that receiving, summing and sending overlap. Used by all_reduce.cc,
// reduce_scatter.cc and all_gather.cc. Internal to collectives/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/schedule_builder.h"

namespace trainmover {

/// Slice s of the vector as it lies in the caller's memory, in element form.
struct RingLayout {
  std::vector<Region> slices;
  std::size_t chunk_bytes = 0;
  std::size_t columns = 0;

  void chunkForReduction(const ScheduleBuilder& builder);
  void chunkForBytes();

  /// Chunk `column` of slice `owner`; empty if that slice is shorter.
  Region chunk(int owner, std::size_t column) const {
    const Region& slice = slices[static_cast<std::size_t>(owner)];
    const Slice part = chunkOf(slice.bytes, chunk_bytes, column);
    return partOf(slice, part.begin, part.end - part.begin);
  }
  /// Of the message that carries it; even numbers while it is summed, odd ones after.
  std::uint64_t tag(int owner, std::size_t column, bool summed) const {
    return (static_cast<std::uint64_t>(owner) * columns + column) * 2 + (summed ? 1 : 0);
  }

 private:
  std::size_t longest() const;
};

/// Adds the steps that sum the vector up, so that this rank ends with slice `rank` of it.
///
/// Scratch doesn't grow with the vector: columns go through a few lanes. A lane has two slots, which its chunks use in
/// turn, in the order (column, distance travelled). A rank's chunk waits at most for its neighbour's slot, that is for
/// the neighbour's chunk before the last, which comes earlier in that order: so it cannot wait for itself round the
/// ring.
class RingReduceScatter {
 public:
  /// `result`: where this rank's slice goes. `in_place`: that is where its contribution to it lies, by contract.
  RingReduceScatter(ScheduleBuilder& builder, const Shape& shape, const RingLayout& layout, const Region& result,
                    bool in_place);

  /// Returns the step after which chunk `column` of the result is there.
  StepId addColumn(std::size_t column);

  /// Of the column added last, by slice: after which this rank's contribution is needed no more.
  const std::vector<StepId>& lastUses() const { return last_uses_; }

 private:
  struct Slot {
    Region region;
    StepId free = kNoStep;
  };
  struct Lane {
    Slot slots[2];
    Slot elements;  // 16-bit floats: what comes in as the neighbour's own elements
    int turn = 0;
  };

  StepId addPassing(int owner, std::size_t column, Lane& lane);
  StepId addLast(std::size_t column, Lane& lane);
  /// Combines what comes in with the own contribution, in a slot.
  StepId addCombined(int owner, std::size_t column, Lane& lane, const Slot& slot);

  ScheduleBuilder& builder_;
  const RingLayout& layout_;
  Region result_;
  bool in_place_;
  int size_;
  int rank_;
  std::vector<Lane> lanes_;
  std::vector<StepId> last_uses_;
};

/// Adds the steps that pass column `column` of all slices round. `own`: this rank's slice, there after `ready`.
/// `last_uses[s]`: after which slice s may be overwritten; may be empty.
void gatherColumn(ScheduleBuilder& builder, const Shape& shape, const RingLayout& layout, const Region& own,
                  std::size_t column, StepId ready, const std::vector<StepId>& last_uses);

}  // namespace trainmover
