// Gather of equal pieces: each straight to the root where all are linked directly, else up a binomial tree. Called by
// schedule.cc.
#include "collectives/builders.h"
#include "collectives/forwarding.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

namespace {

Schedule buildDirect(const Shape& shape, std::size_t bytes) {
  ScheduleBuilder builder(shape, static_cast<std::size_t>(shape.size));
  const Region own = inputPiece(0, bytes);
  if (shape.rank != shape.root) {
    builder.send(shape.root, 0, own, {});
    return builder.take();
  }
  for (int rank = 0; rank < shape.size; ++rank) {
    if (rank == shape.root) {
      builder.copy(own, outputPiece(rank, bytes), {});
    } else {
      builder.receive(rank, 0, outputPiece(rank, bytes), {});
    }
  }
  return builder.take();
}

/// Each packs what the ranks below it gave, in their order from the root, and sends it on at once.
Schedule buildPacked(const Shape& shape, std::size_t bytes) {
  const RootedTree tree(shape.size, shape.root);
  const int v = tree.relative(shape.rank);
  const std::size_t span = static_cast<std::size_t>(tree.span(v));
  ScheduleBuilder builder(shape, v == 0 ? 2 * span : 32);
  const Region own = inputPiece(0, bytes);
  if (span == 1) {
    builder.send(tree.absolute(tree.parent(v)), 0, own, {});
    return builder.take();
  }
  const Region packed = builder.scratch(span * bytes);
  std::vector<StepId> ready{builder.copy(own, v == 0 ? outputPiece(shape.rank, bytes) : partOf(packed, 0, bytes), {})};
  for (int distance = tree.firstChildDistance(v); distance >= 1; distance /= 2) {
    const std::size_t first = static_cast<std::size_t>(distance);
    const int below = tree.span(v + distance);
    const Region region = partOf(packed, first * bytes, static_cast<std::size_t>(below) * bytes);
    ready.push_back(builder.receive(tree.absolute(v + distance), 0, region, {}));
    for (int i = 0; v == 0 && i < below; ++i) {
      builder.copy(partOf(region, static_cast<std::size_t>(i) * bytes, bytes),
                   outputPiece(tree.absolute(distance + i), bytes), {ready.back()});
    }
  }
  if (v != 0) builder.send(tree.absolute(tree.parent(v)), 0, packed, ready);
  return builder.take();
}

/// Pieces go up the tree one by one, in chunks.
Schedule buildStreamed(const Shape& shape, std::size_t bytes) {
  const RootedTree tree(shape.size, shape.root);
  const Region own = inputPiece(0, bytes);
  StreamedPieces pieces(tree, shape.rank, bytes);
  ScheduleBuilder builder(shape, 2 * pieces.chunksInAll());
  Forwarding forwarding(builder, pieces.chunkBytes());
  if (pieces.atRoot()) builder.copy(own, outputPiece(shape.rank, bytes), {});
  pieces.forEach([&](const StreamedPieces::Chunk& chunk) {
    if (chunk.is_own) {
      if (!pieces.atRoot()) builder.send(pieces.parent(), chunk.tag, partOf(own, chunk.begin, chunk.bytes), {});
    } else if (pieces.atRoot()) {
      builder.receive(chunk.child, chunk.tag, partOf(outputPiece(chunk.rank, bytes), chunk.begin, chunk.bytes), {});
    } else {
      forwarding.add(chunk.child, pieces.parent(), chunk.tag, chunk.bytes);
    }
  });
  return builder.take();
}

}  // namespace

Schedule buildGather(const Shape& shape) { return buildRooted(shape, buildDirect, buildPacked, buildStreamed); }

}  // namespace trainmover
