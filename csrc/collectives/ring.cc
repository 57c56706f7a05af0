// See ring.h.
#include "collectives/ring.h"

#include <algorithm>

namespace trainmover {

namespace {
constexpr std::size_t kLanes = 4;
}

std::size_t RingLayout::longest() const {
  std::size_t bytes = 0;
  for (const Region& slice : slices) bytes = std::max(bytes, slice.bytes);
  return bytes;
}

void RingLayout::chunkForBytes() {
  chunk_bytes = pipelineChunkBytes(longest());
  columns = partsOf(longest(), chunk_bytes);
}

void RingLayout::chunkForReduction(const ScheduleBuilder& builder) {
  const std::size_t widening = builder.accumulatorBytes() / builder.elementBytes();
  chunk_bytes = pipelineChunkBytes(longest() * widening) / widening;
  columns = partsOf(longest(), chunk_bytes);
}

RingReduceScatter::RingReduceScatter(ScheduleBuilder& builder, const Shape& shape, const RingLayout& layout,
                                     const Region& result, bool in_place)
    : builder_(builder),
      layout_(layout),
      result_(result),
      in_place_(in_place),
      size_(shape.size),
      rank_(shape.rank),
      lanes_(std::min(kLanes, layout.columns)),
      last_uses_(static_cast<std::size_t>(shape.size), kNoStep) {
  const std::size_t sum_bytes = layout.chunk_bytes / builder.elementBytes() * builder.accumulatorBytes();
  for (Lane& lane : lanes_) {
    for (Slot& slot : lane.slots) slot.region = builder.scratch(sum_bytes);
    if (builder.wide()) lane.elements.region = builder.scratch(layout.chunk_bytes);
  }
}

StepId RingReduceScatter::addColumn(std::size_t column) {
  Lane& lane = lanes_[column % lanes_.size()];
  const int first = modulo(rank_ - 1L, size_);  // the slice whose sum begins here
  last_uses_[static_cast<std::size_t>(first)] =
      builder_.send(modulo(rank_ + 1L, size_), layout_.tag(first, column, false), layout_.chunk(first, column), {});
  for (int hops = 1; hops < size_ - 1; ++hops) {
    const int owner = modulo(rank_ - 1L - hops, size_);
    last_uses_[static_cast<std::size_t>(owner)] = addPassing(owner, column, lane);
  }
  const StepId finished = addLast(column, lane);
  last_uses_[static_cast<std::size_t>(rank_)] = finished;
  return finished;
}

StepId RingReduceScatter::addCombined(int owner, std::size_t column, Lane& lane, const Slot& slot) {
  const Region own = layout_.chunk(owner, column);
  const std::size_t count = own.bytes / builder_.elementBytes();
  const Region sum = builder_.accumulators(slot.region, Slice{0, count});
  const int previous = modulo(rank_ - 1L, size_);
  const bool as_is = previous == modulo(owner + 1L, size_);  // nothing was added yet to what comes in
  if (!builder_.wide() || !as_is) {
    const StepId got = builder_.receive(previous, layout_.tag(owner, column, false), sum, {slot.free});
    return builder_.reduce(own, Form::kElement, sum, count, /*target_first=*/true, {got});
  }
  const Region arrived = partOf(lane.elements.region, 0, own.bytes);
  const StepId got = builder_.receive(previous, layout_.tag(owner, column, false), arrived, {lane.elements.free});
  const StepId widened = builder_.widen(own, sum, count, {slot.free});
  const StepId combined = builder_.reduce(arrived, Form::kElement, sum, count, /*target_first=*/false, {got, widened});
  if (combined != kNoStep) lane.elements.free = combined;
  return combined;
}

StepId RingReduceScatter::addPassing(int owner, std::size_t column, Lane& lane) {
  const std::size_t bytes = layout_.chunk(owner, column).bytes;
  if (bytes == 0) return kNoStep;
  Slot& slot = lane.slots[lane.turn];
  lane.turn ^= 1;
  const StepId combined = addCombined(owner, column, lane, slot);
  const Region sum = builder_.accumulators(slot.region, Slice{0, bytes / builder_.elementBytes()});
  slot.free = builder_.send(modulo(rank_ + 1L, size_), layout_.tag(owner, column, false), sum, {combined});
  return combined;
}

StepId RingReduceScatter::addLast(std::size_t column, Lane& lane) {
  const Region own = layout_.chunk(rank_, column);
  if (own.bytes == 0) return kNoStep;
  const std::size_t count = own.bytes / builder_.elementBytes();
  const Slice part = chunkOf(result_.bytes, layout_.chunk_bytes, column);
  const Region result = partOf(result_, part.begin, part.end - part.begin);
  Slot& slot = lane.slots[lane.turn];
  lane.turn ^= 1;
  const Region sum = builder_.accumulators(slot.region, Slice{0, count});
  if (builder_.wide()) {
    slot.free = builder_.finish(sum, result, count, addCombined(rank_, column, lane, slot));
    return slot.free;
  }
  // The result is combined where it belongs. Its memory may be that of the contribution: then the copy does nothing.
  const StepId copied = in_place_ ? kNoStep : builder_.copy(own, result, {});
  const StepId got = builder_.receive(modulo(rank_ - 1L, size_), layout_.tag(rank_, column, false), sum, {slot.free});
  slot.free = builder_.reduce(sum, Form::kAccumulator, result, count, /*target_first=*/false, {got, copied});
  return builder_.finish(result, result, count, slot.free);
}

void gatherColumn(ScheduleBuilder& builder, const Shape& shape, const RingLayout& layout, const Region& own,
                  std::size_t column, StepId ready, const std::vector<StepId>& last_uses) {
  const int next = modulo(shape.rank + 1L, shape.size);
  const int previous = modulo(shape.rank - 1L, shape.size);
  const Slice part = chunkOf(own.bytes, layout.chunk_bytes, column);
  Region known = partOf(own, part.begin, part.end - part.begin);
  int owner = shape.rank;
  for (int hops = 1; hops < shape.size; ++hops) {
    builder.send(next, layout.tag(owner, column, true), known, {ready});
    owner = modulo(owner - 1L, shape.size);
    known = layout.chunk(owner, column);
    const StepId last_use = last_uses.empty() ? kNoStep : last_uses[static_cast<std::size_t>(owner)];
    ready = builder.receive(previous, layout.tag(owner, column, true), known, {last_use});
  }
}

}  // namespace trainmover
