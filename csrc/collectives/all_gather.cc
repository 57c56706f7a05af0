// All-gather of pieces that may differ in size. Small ones in few rounds: each to each where all are linked directly,
// else by doubling what one holds, packed. Larger ones go round the ring. Called by schedule.cc.
#include <algorithm>

#include "collectives/builders.h"
#include "collectives/ring.h"
#include "collectives/schedule_builder.h"
#include "collectives/topology.h"

namespace trainmover {

namespace {

/// Doubling packs all pieces in scratch: not more than so many bytes.
constexpr std::size_t kDoublingBytesMax = std::size_t{8} << 20;

Schedule buildDirect(const Shape& shape, const std::vector<Region>& pieces, const Region& own) {
  ScheduleBuilder builder(shape, 2 * pieces.size());
  builder.copy(own, pieces[static_cast<std::size_t>(shape.rank)], {});
  for (int distance = 1; distance < shape.size; ++distance) {
    const int from = modulo(static_cast<long>(shape.rank) - distance, shape.size);
    builder.send(modulo(static_cast<long>(shape.rank) + distance, shape.size), 0, own, {});
    builder.receive(from, 0, pieces[static_cast<std::size_t>(from)], {});
  }
  return builder.take();
}

/// After rounds at distance 1, 2, 4 ... a rank holds the pieces of 2, 4, 8 ... ranks from itself on, packed in this
/// order.
Schedule buildDoubling(const Shape& shape, const std::vector<Region>& pieces, const Region& own) {
  const int size = shape.size;
  const int rank = shape.rank;
  ScheduleBuilder builder(shape, 2 * pieces.size() + 64);
  std::vector<std::size_t> places{0};  // [i]: of the piece of rank + i
  for (int i = 0; i < size; ++i) {
    places.push_back(places.back() + pieces[static_cast<std::size_t>(modulo(static_cast<long>(rank) + i, size))].bytes);
  }
  const Region packed = builder.scratch(places.back());
  const auto packedPieces = [&](int begin, int end) {
    const std::size_t from = places[static_cast<std::size_t>(begin)];
    return partOf(packed, from, places[static_cast<std::size_t>(end)] - from);
  };

  builder.copy(own, pieces[static_cast<std::size_t>(rank)], {});
  std::vector<StepId> held{builder.copy(own, packedPieces(0, 1), {})};
  std::uint64_t tag = 0;
  for (int distance = 1; distance < size; distance *= 2, ++tag) {
    const int exchanged = std::min(distance, size - distance);
    builder.send(modulo(static_cast<long>(rank) - distance, size), tag, packedPieces(0, exchanged), held);
    const StepId got = builder.receive(modulo(static_cast<long>(rank) + distance, size), tag,
                                       packedPieces(distance, distance + exchanged), {});
    held.push_back(got);
    for (int i = distance; i < distance + exchanged; ++i) {
      const std::size_t from = static_cast<std::size_t>(modulo(static_cast<long>(rank) + i, size));
      builder.copy(packedPieces(i, i + 1), pieces[from], {got});
    }
  }
  return builder.take();
}

Schedule buildRing(const Shape& shape, const std::vector<Region>& pieces, const Region& own) {
  ScheduleBuilder builder(shape, 0);
  RingLayout layout;
  layout.slices = pieces;
  layout.chunkForBytes();
  builder.expect(layout.columns * 2 * pieces.size() + 1);
  builder.copy(own, pieces[static_cast<std::size_t>(shape.rank)], {});
  for (std::size_t column = 0; column < layout.columns; ++column) {
    gatherColumn(builder, shape, layout, own, column, kNoStep, {});
  }
  return builder.take();
}

}  // namespace

Schedule buildAllGather(const Shape& shape) {
  std::vector<Region> pieces;
  std::size_t bytes = 0;
  for (int piece = 0; piece < shape.size; ++piece) {
    pieces.push_back(outputPiece(piece, shape.pieces[static_cast<std::size_t>(piece)]));
    bytes += pieces.back().bytes;
  }
  const Region own = inputPiece(0, shape.pieces[static_cast<std::size_t>(shape.rank)]);
  const bool small = bytes < kRingBytesPerRank * static_cast<std::size_t>(shape.size);
  if (small && shape.size <= kDirectSize) return buildDirect(shape, pieces, own);
  if (small && bytes <= kDoublingBytesMax) return buildDoubling(shape, pieces, own);
  return buildRing(shape, pieces, own);
}

}  // namespace trainmover
