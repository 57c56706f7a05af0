// Reduce-scatter of pieces that may differ in size. Small vectors are packed and halved (ReductionOrder::kTree), larger
// ones go once round the ring (kRing). Called by schedule.cc.
#include <algorithm>

#include "collectives/builders.h"
#include "collectives/halving.h"
#include "collectives/ring.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

namespace {

/// Halving works on segments independently, each a part of every piece: of about so many bytes, and so many per rank at
/// least, lest there be more pieces to pack than bytes worth packing.
constexpr std::size_t kSegmentBytes = std::size_t{256} << 10;
constexpr std::size_t kSegmentBytesPerRank = std::size_t{1} << 10;
constexpr std::size_t kSegmentsAtOnce = 2;

/// A part of each piece, in the order in which they are packed: block i of the halving is piece i and, where there is
/// an extra, the piece of that.
struct Segment {
  std::vector<Slice> parts;         // [piece], in elements of it
  std::vector<std::size_t> places;  // [piece], in elements of the packed segment
  std::vector<std::size_t> bounds;  // of blocks
  std::size_t count() const { return bounds.back(); }
  std::size_t lengthOf(int piece) const {
    const Slice& part = parts[static_cast<std::size_t>(piece)];
    return part.end - part.begin;
  }
};

class HalvingReduceScatter {
 public:
  explicit HalvingReduceScatter(const Shape& shape)
      : shape_(shape), rank_(shape.rank), tree_(shape.size), builder_(shape, 0) {
    std::size_t count = 0;
    for (std::size_t piece : shape.pieces) count += piece;
    const std::size_t segment_bytes =
        std::max(kSegmentBytes, kSegmentBytesPerRank * static_cast<std::size_t>(shape.size));
    segments_ = static_cast<int>(partsOf(count * builder_.elementBytes(), segment_bytes));
  }

  Schedule build() {
    addScratch();
    for (int index = 0; index < segments_; ++index) {
      const Segment segment = segmentAt(index);
      if (segment.count() == 0) break;
      const std::uint64_t first_tag = static_cast<std::uint64_t>(index) * kTagsPerSegment;
      Scratch& scratch = scratch_[static_cast<std::size_t>(index) % scratch_.size()];
      std::vector<StepId> users =
          tree_.isExtra(rank_) ? addExtra(segment, first_tag, scratch) : addSegment(segment, first_tag, scratch);
      if (index + static_cast<int>(scratch_.size()) < segments_) scratch.free = builder_.join(users);
    }
    return builder_.take();
  }

 private:
  struct Scratch {
    Region sum;         // accumulators of the segment
    Region elements;    // 16-bit floats: what is given as it is
    Region buffers[2];  // for what comes in
    StepId free = kNoStep;
  };

  Segment segmentAt(int index) const {
    Segment segment;
    for (std::size_t piece : shape_.pieces) segment.parts.push_back(sliceOf(piece, segments_, index));
    segment.places.resize(segment.parts.size());
    segment.bounds.push_back(0);
    std::size_t place = 0;
    for (int block = 0; block < tree_.powerOfTwo(); ++block) {
      segment.places[static_cast<std::size_t>(block)] = place;
      place += segment.lengthOf(block);
      if (tree_.isFolded(block)) {
        const int extra = block + tree_.powerOfTwo();
        segment.places[static_cast<std::size_t>(extra)] = place;
        place += segment.lengthOf(extra);
      }
      segment.bounds.push_back(place);
    }
    return segment;
  }

  /// No segment is longer than the first in any piece.
  void addScratch() {
    const Segment largest = segmentAt(0);
    const std::size_t elements_bytes = largest.count() * builder_.elementBytes();
    scratch_.resize(static_cast<std::size_t>(std::min<long>(segments_, kSegmentsAtOnce)));
    for (Scratch& scratch : scratch_) {
      if (tree_.isExtra(rank_)) {
        scratch.elements = builder_.scratch(elements_bytes);
        continue;
      }
      scratch.sum = builder_.scratch(largest.count() * builder_.accumulatorBytes());
      scratch.elements = scratch.sum;
      if (builder_.wide() && !tree_.isFolded(rank_)) scratch.elements = builder_.scratch(elements_bytes);
      for (int turn = 0; turn < 2; ++turn) {
        std::size_t bytes = halvingBufferBytes(tree_, rank_, largest.bounds, turn, builder_.accumulatorBytes());
        if (turn == 0 && tree_.isFolded(rank_)) bytes = std::max(bytes, elements_bytes);
        scratch.buffers[turn] = builder_.scratch(bytes);
      }
    }
  }

  /// Copies, or widens, this rank's part of `piece` to its place in `target`.
  StepId pack(const Segment& segment, int piece, const Region& target, bool widened, StepId free) {
    const std::size_t length = segment.lengthOf(piece);
    const std::size_t begin = segment.places[static_cast<std::size_t>(piece)];
    const Region source = builder_.elements(inputPiece(piece, 0), segment.parts[static_cast<std::size_t>(piece)]);
    const Slice place{begin, begin + length};
    return widened ? builder_.widen(source, builder_.accumulators(target, place), length, {free})
                   : builder_.copy(source, builder_.elements(target, place), {free});
  }

  Region outputPart(const Segment& segment) const {
    return builder_.elements(outputPiece(0, 0), segment.parts[static_cast<std::size_t>(rank_)]);
  }

  std::vector<StepId> addExtra(const Segment& segment, std::uint64_t first_tag, const Scratch& scratch) {
    const int peer = rank_ - tree_.powerOfTwo();
    std::vector<StepId> packed;
    for (int piece = 0; piece < shape_.size; ++piece) {
      packed.push_back(pack(segment, piece, scratch.elements, /*widened=*/false, scratch.free));
    }
    const Region all = builder_.elements(scratch.elements, Slice{0, segment.count()});
    const StepId sent = builder_.send(peer, first_tag + kFoldTag, all, {builder_.join(packed)});
    builder_.receive(peer, first_tag + kUnfoldTag, outputPart(segment), {sent});
    return {sent};
  }

  /// Packs all this rank gives; what it keeps as accumulators.
  void addOwn(HalvingPlan& plan, const Segment& segment, const Scratch& scratch) {
    const bool folded = tree_.isFolded(rank_);
    const int half = tree_.firstDistance();
    std::vector<StepId> kept;
    std::vector<StepId> given;
    for (int piece = 0; piece < shape_.size; ++piece) {
      const int block = tree_.isExtra(piece) ? piece - tree_.powerOfTwo() : piece;
      if (folded || ((block ^ rank_) & half) == 0) {
        kept.push_back(pack(segment, piece, scratch.sum, /*widened=*/true, scratch.free));
      } else {
        given.push_back(pack(segment, piece, scratch.elements, /*widened=*/false, scratch.free));
      }
    }
    plan.kept = builder_.join(kept);
    plan.given = builder_.join(given);
    if (!folded) return;
    const Region buffer = builder_.elements(scratch.buffers[0], Slice{0, segment.count()});
    const StepId got = builder_.receive(rank_ + tree_.powerOfTwo(), plan.first_tag + kFoldTag, buffer, {plan.free});
    plan.kept = builder_.reduce(buffer, Form::kElement, builder_.accumulators(scratch.sum, {0, segment.count()}),
                                segment.count(), /*target_first=*/true, {got, plan.kept});
    plan.given = plan.kept;
    plan.free = plan.kept;
  }

  /// Returns the last steps that use the scratch.
  std::vector<StepId> addSegment(const Segment& segment, std::uint64_t first_tag, const Scratch& scratch) {
    HalvingPlan plan;
    plan.bounds = segment.bounds;
    plan.accumulators = scratch.sum;
    plan.elements = scratch.elements;
    plan.buffers[0] = scratch.buffers[0];
    plan.buffers[1] = scratch.buffers[1];
    plan.free = scratch.free;
    plan.first_tag = first_tag;
    addOwn(plan, segment, scratch);
    const HalvingResult halved = halve(builder_, tree_, rank_, plan);

    std::vector<StepId> users(halved.sent.begin(), halved.sent.end());
    users.push_back(halved.ready);
    const std::size_t begin = segment.places[static_cast<std::size_t>(rank_)];
    const std::size_t own = segment.lengthOf(rank_);
    users.push_back(builder_.finish(builder_.accumulators(scratch.sum, Slice{begin, begin + own}), outputPart(segment),
                                    own, halved.ready));
    if (tree_.isFolded(rank_)) {
      const int extra = rank_ + tree_.powerOfTwo();
      const std::size_t length = segment.lengthOf(extra);
      const Region sum = builder_.accumulators(scratch.sum, Slice{begin + own, begin + own + length});
      const Region finished = partOf(sum, 0, length * builder_.elementBytes());
      const StepId ready = builder_.finish(sum, finished, length, halved.ready);
      users.push_back(builder_.send(extra, first_tag + kUnfoldTag, finished, {ready}));
    }
    return users;
  }

  const Shape& shape_;
  int rank_;
  ReductionTree tree_;
  ScheduleBuilder builder_;
  int segments_ = 0;
  std::vector<Scratch> scratch_;
};

Schedule buildRing(const Shape& shape) {
  ScheduleBuilder builder(shape, 0);
  RingLayout layout;
  for (int owner = 0; owner < shape.size; ++owner) {
    const std::size_t count = shape.pieces[static_cast<std::size_t>(owner)];
    layout.slices.push_back(inputPiece(owner, count * builder.elementBytes()));
  }
  layout.chunkForReduction(builder);
  builder.expect(layout.columns * (3 * static_cast<std::size_t>(shape.size) + 4));
  const Region result = outputPiece(0, layout.slices[static_cast<std::size_t>(shape.rank)].bytes);
  RingReduceScatter ring(builder, shape, layout, result, /*in_place=*/false);
  for (std::size_t column = 0; column < layout.columns; ++column) ring.addColumn(column);
  return builder.take();
}

}  // namespace

Schedule buildReduceScatter(const Shape& shape) {
  std::size_t bytes = 0;
  for (std::size_t piece : shape.pieces) bytes += piece * elementBytes(shape.dtype);
  if (bytes == 0) return Schedule{};
  if (shape.size == 1) {
    ScheduleBuilder builder(shape, 1);
    builder.copy(inputPiece(0, bytes), outputPiece(0, bytes), {});
    return builder.take();
  }
  return reductionOrder(bytes, shape.size) == ReductionOrder::kRing ? buildRing(shape)
                                                                    : HalvingReduceScatter(shape).build();
}

}  // namespace trainmover
