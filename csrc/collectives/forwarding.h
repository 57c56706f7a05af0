// What gather.cc and scatter.cc share, which go the same ways in opposite directions. Internal to collectives/.
#pragma once

#include <array>
#include <cstddef>

#include "collectives/schedule_builder.h"
#include "collectives/topology.h"
#include "collectives/tree.h"

namespace trainmover {

/// Gathers and scatters of up to this many bytes in all send one packed message along each edge of the tree; larger
/// ones send each piece apart, in chunks.
constexpr std::size_t kPackedBytesMax = kChunkBytes;

/// Scratch for data that a rank only passes on: a few slots that chunks use in turn.
///
/// A chunk waits for its slot, that is until the chunk before in it has gone on, which waits for a slot further along
/// the tree. All ranks handle the chunks that they share in the same order, so none waits for a later one, and the
/// first never waits.
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

/// The pieces of a rank and of those below it in the tree, each in chunks, in the order in which all ranks handle them.
class StreamedPieces {
 public:
  StreamedPieces(const RootedTree& tree, int rank, std::size_t bytes)
      : tree_(tree), v_(tree.relative(rank)), bytes_(bytes), chunk_(pipelineChunkBytes(bytes)) {}

  struct Chunk {
    int rank;  // whose piece it is of
    bool is_own;
    int child;  // the rank below through which it comes or goes, unless it is one's own
    std::uint64_t tag;
    std::size_t begin, bytes;  // within the piece
  };

  bool atRoot() const { return v_ == 0; }
  int parent() const { return tree_.absolute(tree_.parent(v_)); }
  std::size_t chunkBytes() const { return chunk_; }
  std::size_t chunksInAll() const { return chunks() * static_cast<std::size_t>(tree_.span(v_)); }

  template <typename Visit>
  void forEach(Visit visit) const {
    for (int below = v_; below < v_ + tree_.span(v_); ++below) {
      const bool own = below == v_;
      const int child = own ? -1 : tree_.absolute(tree_.childTowards(v_, below));
      for (std::size_t index = 0; index < chunks(); ++index) {
        const Slice part = chunkOf(bytes_, chunk_, index);
        const std::uint64_t tag = static_cast<std::uint64_t>(below) * chunks() + index;
        visit(Chunk{tree_.absolute(below), own, child, tag, part.begin, part.end - part.begin});
      }
    }
  }

 private:
  std::size_t chunks() const { return partsOf(bytes_, chunk_); }

  const RootedTree& tree_;
  int v_;
  std::size_t bytes_, chunk_;
};

/// Chooses among the three ways of a gather or scatter of `shape.pieces[0]` bytes a rank.
template <typename Direct, typename Packed, typename Streamed>
Schedule buildRooted(const Shape& shape, Direct direct, Packed packed, Streamed streamed) {
  const std::size_t bytes = shape.pieces[0];
  if (bytes == 0) return Schedule{};
  if (shape.size <= kDirectSize) return direct(shape, bytes);
  return bytes <= kPackedBytesMax / static_cast<std::size_t>(shape.size) ? packed(shape, bytes)
                                                                         : streamed(shape, bytes);
}

}  // namespace trainmover
