// Reduce: up the tree of ReductionOrder::kTree, in chunks. The tree's pairs are fixed, but either of a pair can take
// the other's part: the one on the root's side does, so that the result arises at the root, or, for a root beyond the
// largest power of two, one link away from it. Called by schedule.cc.
#include <algorithm>

#include "collectives/builders.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

namespace {

/// So many chunks are under way at once, each with its own scratch.
constexpr std::size_t kChunksAtOnce = 4;

// Tags of a chunk: 0 ... 30 the rounds, then these.
constexpr std::uint64_t kFoldTag = 31;
constexpr std::uint64_t kResultTag = 32;
constexpr std::uint64_t kTagsPerChunk = 64;

class ReduceBuilder {
 public:
  explicit ReduceBuilder(const Shape& shape)
      : rank_(shape.rank),
        root_(shape.root),
        count_(shape.pieces[0]),
        tree_(shape.size),
        top_(tree_.isExtra(root_) ? root_ - tree_.powerOfTwo() : root_),
        builder_(shape, 16),
        chunk_(std::min(pipelineChunkBytes(count_ * builder_.accumulatorBytes()), kUsualChunkBytes) /
               builder_.accumulatorBytes()),
        input_(inputPiece(0, count_ * builder_.elementBytes())),
        output_(outputPiece(0, input_.bytes)) {}

  Schedule build() {
    const std::size_t chunks = partsOf(count_, chunk_);
    if (!tree_.isExtra(rank_)) addScratch(std::min(chunks, kChunksAtOnce));
    for (std::size_t index = 0; index < chunks; ++index) {
      const Slice part = chunkOf(count_, chunk_, index);
      const std::uint64_t first_tag = index * kTagsPerChunk;
      if (tree_.isExtra(rank_)) {
        addExtra(part, first_tag);
      } else {
        addChunk(part, first_tag, scratch_[index % scratch_.size()]);
      }
    }
    return builder_.take();
  }

 private:
  struct ChunkScratch {
    Region sum;                   // used when the first to come in are 16-bit floats
    std::vector<Region> buffers;  // one for each that comes in
    StepId free = kNoStep;
  };
  /// The own contribution, and what was combined with it so far.
  struct Partial {
    Region elements;
    Region sum;
    bool summed = false;  // else there are only the elements
    StepId ready = kNoStep;
    std::size_t combined = 0;  // number of others
  };

  void addScratch(std::size_t chunks) {
    std::size_t others = tree_.isFolded(rank_) ? 1 : 0;
    for (int distance = tree_.firstDistance(); distance >= 1; distance /= 2) {
      if ((rank_ ^ top_) & distance) break;
      ++others;
    }
    scratch_.resize(chunks);
    if (others == 0) return;
    const std::size_t bytes = std::min(count_, chunk_) * builder_.accumulatorBytes();
    for (ChunkScratch& scratch : scratch_) {
      if (builder_.wide()) scratch.sum = builder_.scratch(bytes);
      for (std::size_t i = 0; i < others; ++i) scratch.buffers.push_back(builder_.scratch(bytes));
    }
  }

  void addExtra(Slice part, std::uint64_t first_tag) {
    const StepId sent =
        builder_.send(rank_ - tree_.powerOfTwo(), first_tag + kFoldTag, builder_.elements(input_, part), {});
    if (rank_ == root_) builder_.receive(top_, first_tag + kResultTag, builder_.elements(output_, part), {sent});
  }

  void addChunk(Slice part, std::uint64_t first_tag, ChunkScratch& scratch) {
    const std::size_t count = part.end - part.begin;
    Partial partial;
    partial.elements = builder_.elements(input_, part);
    const Region result = builder_.elements(output_, part);
    if (rank_ == root_ && !builder_.wide()) {  // combined where it belongs
      partial.ready = builder_.copy(partial.elements, result, {});
      partial.sum = result;
      partial.summed = true;
    }
    if (tree_.isFolded(rank_)) {
      combine(partial, rank_ + tree_.powerOfTwo(), Form::kElement, first_tag + kFoldTag, count, scratch);
    }
    std::uint64_t tag = first_tag;
    for (int distance = tree_.firstDistance(); distance >= 1; distance /= 2, ++tag) {
      const int peer = rank_ ^ distance;
      if ((rank_ ^ top_) & distance) {
        scratch.free = partial.summed ? builder_.send(peer, tag, partial.sum, {partial.ready})
                                      : builder_.send(peer, tag, partial.elements, {});
        return;
      }
      combine(partial, peer, tree_.formAt(peer, distance), tag, count, scratch);
    }
    if (rank_ == root_) {
      scratch.free = builder_.finish(partial.sum, result, count, partial.ready);
      return;
    }
    const Region finished = partOf(partial.sum, 0, count * builder_.elementBytes());
    const StepId ready = builder_.finish(partial.sum, finished, count, partial.ready);
    scratch.free = builder_.send(root_, first_tag + kResultTag, finished, {ready});
  }

  /// Combines with `partial` what `peer` holds, lower rank first.
  void combine(Partial& partial, int peer, Form form, std::uint64_t tag, std::size_t count, ChunkScratch& scratch) {
    const bool own_first = rank_ < peer;
    const Region buffer = builder_.inForm(scratch.buffers[partial.combined++], Slice{0, count}, form);
    const StepId got = builder_.receive(peer, tag, buffer, {scratch.free});
    if (!partial.summed && (form == Form::kAccumulator || !builder_.wide())) {
      partial.sum = buffer;
      partial.ready = builder_.reduce(partial.elements, Form::kElement, buffer, count, !own_first, {got});
    } else {
      if (!partial.summed) {
        partial.sum = builder_.accumulators(scratch.sum, Slice{0, count});
        partial.ready = builder_.widen(partial.elements, partial.sum, count, {scratch.free});
      }
      partial.ready = builder_.reduce(buffer, form, partial.sum, count, own_first, {got, partial.ready});
    }
    partial.summed = true;
  }

  int rank_;
  int root_;
  std::size_t count_;
  ReductionTree tree_;
  int top_;  // the rank of the tree where the result arises
  ScheduleBuilder builder_;
  std::size_t chunk_;  // elements
  Region input_;
  Region output_;
  std::vector<ChunkScratch> scratch_;
};

}  // namespace

Schedule buildReduce(const Shape& shape) {
  if (shape.size > 1) return ReduceBuilder(shape).build();
  ScheduleBuilder builder(shape, 1);
  const std::size_t bytes = shape.pieces[0] * elementBytes(shape.dtype);
  builder.copy(inputPiece(0, bytes), outputPiece(0, bytes), {});
  return builder.take();
}

}  // namespace trainmover
