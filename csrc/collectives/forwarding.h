// Scratch for data that a rank only passes on: a few slots that chunks use in turn. Used by gather.cc and scatter.cc.
// Internal to collectives/.
//
// A chunk waits for its slot, that is until the chunk before in it has gone on, which waits for a slot further along
// the tree. All ranks handle the chunks that they share in the same order, so none waits for a later one, and the first
// never waits.
#pragma once

#include <array>
#include <cstddef>

#include "collectives/schedule_builder.h"

namespace trainmover {

/// Gathers and scatters of up to this many bytes in all send one packed message along each edge of the tree; larger
/// ones send each piece apart, in chunks.
constexpr std::size_t kPackedBytesMax = kChunkBytes;

class Forwarding {
 public:
  Forwarding(ScheduleBuilder& builder, std::size_t chunk) : builder_(builder), chunk_(chunk) {}

  /// Receives `bytes` from `from` and sends them to `to`.
  void add(int from, int to, std::uint64_t tag, std::size_t bytes) {
    Slot& slot = slots_[turn_];
    turn_ = (turn_ + 1) % slots_.size();
    if (slot.region.bytes == 0) slot.region = builder_.scratch(chunk_);
    const Region region = partOf(slot.region, 0, bytes);
    const StepId got = builder_.receive(from, tag, region, {slot.free});
    slot.free = builder_.send(to, tag, region, {got});
  }

 private:
  struct Slot {
    Region region;
    StepId free = kNoStep;
  };
  ScheduleBuilder& builder_;
  std::size_t chunk_;
  std::size_t turn_ = 0;
  std::array<Slot, 8> slots_;
};

}  // namespace trainmover
