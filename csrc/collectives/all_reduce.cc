// All-reduce, in place. Small vectors: recursive doubling, one message a round. Up to kRingBytesPerRank: recursive
// halving, then the same path back. Larger ones: round the ring, twice. The first two follow ReductionOrder::kTree, the
// last kRing. Called by schedule.cc.
#include <algorithm>

#include "collectives/builders.h"
#include "collectives/halving.h"
#include "collectives/ring.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

namespace {

/// Vectors up to this many bytes double: each round sends all of them, in one eager message.
constexpr std::size_t kDoublingBytesMax = std::size_t{16} << 10;
/// Halving works on segments of about this many bytes independently, so that sends, receives and sums overlap.
constexpr std::size_t kSegmentBytes = std::size_t{256} << 10;
/// So many segments are under way at once; each has its own scratch, of at most 3.5 times its bytes.
constexpr std::size_t kSegmentsAtOnce = 8;

constexpr std::uint64_t kGatherTag = kUnfoldTag + 1;  // + bit of the distance

/// An extra gives its contribution, and gets the result.
void addExtra(ScheduleBuilder& builder, const ReductionTree& tree, int rank, std::uint64_t first_tag,
              const Region& vector) {
  const int peer = rank - tree.powerOfTwo();
  const StepId sent = builder.send(peer, first_tag + kFoldTag, vector, {});
  builder.receive(peer, first_tag + kUnfoldTag, vector, {sent});
}

Schedule buildDoubling(const Shape& shape) {
  const ReductionTree tree(shape.size);
  const int rank = shape.rank;
  const std::size_t count = shape.pieces[0];
  ScheduleBuilder builder(shape, 24);
  const Region vector = outputPiece(0, count * builder.elementBytes());
  if (tree.isExtra(rank)) {
    addExtra(builder, tree, rank, 0, vector);
    return builder.take();
  }
  const Region sum = builder.wide() ? builder.scratch(count * builder.accumulatorBytes()) : vector;
  StepId ready = builder.wide() ? builder.widen(vector, sum, count, {}) : kNoStep;
  if (tree.isFolded(rank)) {
    const Region buffer = builder.scratch(vector.bytes);
    const StepId got = builder.receive(rank + tree.powerOfTwo(), kFoldTag, buffer, {});
    ready = builder.reduce(buffer, Form::kElement, sum, count, /*target_first=*/true, {got, ready});
  }
  StepId vector_sent = kNoStep;
  std::uint64_t tag = 0;
  for (int distance = tree.firstDistance(); distance >= 1; distance /= 2, ++tag) {
    const int peer = rank ^ distance;
    const Form theirs = tree.formAt(peer, distance);
    const bool as_is = builder.wide() && tree.formAt(rank, distance) == Form::kElement;
    const StepId sent = as_is ? builder.send(peer, tag, vector, {}) : builder.send(peer, tag, sum, {ready});
    if (as_is) vector_sent = sent;
    const Region buffer = builder.inForm(builder.scratch(sum.bytes), Slice{0, count}, theirs);
    const StepId got = builder.receive(peer, tag, buffer, {});
    ready =
        builder.reduce(buffer, theirs, sum, count, /*target_first=*/rank < peer, {got, ready, as_is ? kNoStep : sent});
  }
  const StepId finished = builder.finish(sum, vector, count, ready, vector_sent);
  if (tree.isFolded(rank)) builder.send(rank + tree.powerOfTwo(), kUnfoldTag, vector, {finished});
  return builder.take();
}

/// Scratch that segments use in turn.
struct SegmentScratch {
  Region sum;         // 16-bit floats: accumulators of the segment
  Region buffers[2];  // for what comes in
  StepId free = kNoStep;
};

class HalvingAllReduce {
 public:
  explicit HalvingAllReduce(const Shape& shape)
      : rank_(shape.rank),
        count_(shape.pieces[0]),
        tree_(shape.size),
        builder_(shape, 0),
        vector_(outputPiece(0, count_ * builder_.elementBytes())) {}

  Schedule build() {
    segments_ = partsOf(vector_.bytes, kSegmentBytes);
    const int segments = static_cast<int>(segments_);
    if (!tree_.isExtra(rank_)) {
      scratch_.resize(std::min(segments_, kSegmentsAtOnce));
      for (SegmentScratch& scratch : scratch_) addScratch(scratch);
    }
    for (int index = 0; index < segments; ++index) {
      const Region segment = builder_.elements(vector_, sliceOf(count_, segments, index));
      if (segment.bytes == 0) break;
      const std::uint64_t first_tag = static_cast<std::uint64_t>(index) * kTagsPerSegment;
      if (tree_.isExtra(rank_)) {
        addExtra(builder_, tree_, rank_, first_tag, segment);
      } else {
        addSegment(static_cast<std::size_t>(index), segment, first_tag);
      }
    }
    return builder_.take();
  }

 private:
  std::vector<std::size_t> boundsOf(std::size_t count) const {
    const int blocks = tree_.powerOfTwo();
    std::vector<std::size_t> bounds(static_cast<std::size_t>(blocks) + 1, count);
    for (int block = 0; block < blocks; ++block) {
      bounds[static_cast<std::size_t>(block)] = sliceOf(count, blocks, block).begin;
    }
    return bounds;
  }

  void addScratch(SegmentScratch& scratch) {
    const Slice largest = sliceOf(count_, static_cast<int>(segments_), 0);
    const std::vector<std::size_t> bounds = boundsOf(largest.end);
    if (builder_.wide()) scratch.sum = builder_.scratch(largest.end * builder_.accumulatorBytes());
    for (int turn = 0; turn < 2; ++turn) {
      std::size_t bytes = halvingBufferBytes(tree_, 0, bounds, turn, builder_.accumulatorBytes());
      if (turn == 0 && tree_.isFolded(rank_)) bytes = std::max(bytes, largest.end * builder_.elementBytes());
      scratch.buffers[turn] = builder_.scratch(bytes);
    }
  }

  void addSegment(std::size_t index, const Region& segment, std::uint64_t first_tag) {
    SegmentScratch& scratch = scratch_[index % scratch_.size()];
    const std::size_t count = segment.bytes / builder_.elementBytes();
    HalvingPlan plan;
    plan.bounds = boundsOf(count);
    plan.elements = segment;
    plan.accumulators = builder_.wide() ? scratch.sum : segment;
    plan.buffers[0] = scratch.buffers[0];
    plan.buffers[1] = scratch.buffers[1];
    plan.first_tag = first_tag;
    plan.free = scratch.free;
    addOwn(plan, segment, count);
    const HalvingResult halved = halve(builder_, tree_, rank_, plan);

    const Slice block = blocksAt(plan.bounds, rank_, 1);
    const StepId finished = builder_.finish(builder_.accumulators(plan.accumulators, block),
                                            builder_.elements(segment, block), block.end - block.begin, halved.ready);
    addGathering(plan, segment, halved, finished);
    if (index + scratch_.size() < segments_) {
      std::vector<StepId> users(halved.sent.begin(), halved.sent.end());
      users.push_back(halved.ready);
      users.push_back(finished);
      scratch.free = builder_.join(users);
    }
  }

  /// Own contribution and, when folded, that of the extra.
  void addOwn(HalvingPlan& plan, const Region& segment, std::size_t count) {
    const int half = tree_.firstDistance();
    const bool folded = tree_.isFolded(rank_);
    if (builder_.wide()) {
      const Slice own = folded ? Slice{0, count} : blocksAt(plan.bounds, blocksKept(rank_, half), half);
      plan.kept = builder_.widen(builder_.elements(segment, own), builder_.accumulators(plan.accumulators, own),
                                 own.end - own.begin, {plan.free});
    }
    if (!folded) return;
    const Region buffer = partOf(plan.buffers[0], 0, segment.bytes);
    const StepId got = builder_.receive(rank_ + tree_.powerOfTwo(), plan.first_tag + kFoldTag, buffer, {plan.free});
    plan.kept = builder_.reduce(buffer, Form::kElement, builder_.accumulators(plan.accumulators, {0, count}), count,
                                /*target_first=*/true, {got, plan.kept});
    plan.given = plan.kept;
    plan.free = plan.kept;
  }

  /// The way back: at each distance the two exchange all they have, then each has both.
  void addGathering(const HalvingPlan& plan, const Region& segment, const HalvingResult& halved, StepId finished) {
    std::vector<StepId> had{finished};
    std::size_t bit = 0;
    for (int distance = 1; distance < tree_.powerOfTwo(); distance *= 2, ++bit) {
      const int peer = rank_ ^ distance;
      const std::uint64_t tag = plan.first_tag + kGatherTag + static_cast<std::uint64_t>(bit);
      const Slice have = blocksAt(plan.bounds, blocksKept(rank_, distance), distance);
      const Slice lack = blocksAt(plan.bounds, blocksGiven(rank_, distance), distance);
      builder_.send(peer, tag, builder_.elements(segment, have), had);
      had.push_back(builder_.receive(peer, tag, builder_.elements(segment, lack), {halved.sent[bit]}));
    }
    if (tree_.isFolded(rank_)) {
      builder_.send(rank_ + tree_.powerOfTwo(), plan.first_tag + kUnfoldTag, segment, had);
    }
  }

  int rank_;
  std::size_t count_;
  ReductionTree tree_;
  ScheduleBuilder builder_;
  Region vector_;
  std::size_t segments_ = 0;
  std::vector<SegmentScratch> scratch_;
};

/// Ring reduce-scatter of sliceOf() slices, then ring all-gather; each column of chunks goes its own way.
Schedule buildRing(const Shape& shape) {
  const std::size_t count = shape.pieces[0];
  ScheduleBuilder builder(shape, 0);
  const Region vector = outputPiece(0, count * builder.elementBytes());
  RingLayout layout;
  for (int owner = 0; owner < shape.size; ++owner) {
    layout.slices.push_back(builder.elements(vector, sliceOf(count, shape.size, owner)));
  }
  layout.chunkForReduction(builder);
  builder.expect(layout.columns * (5 * static_cast<std::size_t>(shape.size) + 4));
  const Region own = layout.slices[static_cast<std::size_t>(shape.rank)];
  RingReduceScatter reduce_scatter(builder, shape, layout, own, /*in_place=*/true);
  for (std::size_t column = 0; column < layout.columns; ++column) {
    const StepId finished = reduce_scatter.addColumn(column);
    gatherColumn(builder, shape, layout, own, column, finished, reduce_scatter.lastUses());
  }
  return builder.take();
}

}  // namespace

Schedule buildAllReduce(const Shape& shape) {
  const std::size_t bytes = shape.pieces[0] * elementBytes(shape.dtype);
  if (shape.size == 1 || bytes == 0) return Schedule{};
  if (reductionOrder(bytes, shape.size) == ReductionOrder::kRing) return buildRing(shape);
  if (bytes <= kDoublingBytesMax) return buildDoubling(shape);
  return HalvingAllReduce(shape).build();
}

}  // namespace trainmover
