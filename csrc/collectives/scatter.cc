// Scatter of equal pieces: the way of gather.cc, backwards. Called by schedule.cc.
#include "collectives/builders.h"
#include "collectives/forwarding.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

namespace {

Schedule buildDirect(const Shape& shape, std::size_t bytes) {
  ScheduleBuilder builder(shape, static_cast<std::size_t>(shape.size));
  const Region own = outputPiece(0, bytes);
  if (shape.rank != shape.root) {
    builder.receive(shape.root, 0, own, {});
    return builder.take();
  }
  for (int rank = 0; rank < shape.size; ++rank) {
    if (rank == shape.root) {
      builder.copy(inputPiece(rank, bytes), own, {});
    } else {
      builder.send(rank, 0, inputPiece(rank, bytes), {});
    }
  }
  return builder.take();
}

/// The root packs the pieces in the order of the ranks from itself; each hands on what is for those below it.
Schedule buildPacked(const Shape& shape, std::size_t bytes) {
  const RootedTree tree(shape.size, shape.root);
  const int v = tree.relative(shape.rank);
  const std::size_t span = static_cast<std::size_t>(tree.span(v));
  ScheduleBuilder builder(shape, v == 0 ? 2 * span : 32);
  const Region own = outputPiece(0, bytes);
  const int parent = tree.absolute(tree.parent(v));
  if (span == 1) {
    builder.receive(parent, 0, own, {});
    return builder.take();
  }
  const Region packed = builder.scratch(span * bytes);
  const StepId got = v == 0 ? kNoStep : builder.receive(parent, 0, packed, {});
  for (int distance = tree.firstChildDistance(v); distance >= 1; distance /= 2) {
    const std::size_t first = static_cast<std::size_t>(distance);
    const std::size_t below = static_cast<std::size_t>(tree.span(v + distance));
    std::vector<StepId> ready{got};
    for (std::size_t i = first; v == 0 && i < first + below; ++i) {
      const Region piece = inputPiece(tree.absolute(static_cast<int>(i)), bytes);
      ready.push_back(builder.copy(piece, partOf(packed, i * bytes, bytes), {}));
    }
    builder.send(tree.absolute(v + distance), 0, partOf(packed, first * bytes, below * bytes), {builder.join(ready)});
  }
  builder.copy(v == 0 ? inputPiece(shape.rank, bytes) : partOf(packed, 0, bytes), own, {got});
  return builder.take();
}

/// Pieces go down the tree one by one, in chunks.
Schedule buildStreamed(const Shape& shape, std::size_t bytes) {
  const RootedTree tree(shape.size, shape.root);
  const Region own = outputPiece(0, bytes);
  StreamedPieces pieces(tree, shape.rank, bytes);
  ScheduleBuilder builder(shape, 2 * pieces.chunksInAll());
  Forwarding forwarding(builder, pieces.chunkBytes());
  if (pieces.atRoot()) builder.copy(inputPiece(shape.rank, bytes), own, {});
  pieces.forEach([&](const StreamedPieces::Chunk& chunk) {
    if (chunk.is_own) {
      if (!pieces.atRoot()) builder.receive(pieces.parent(), chunk.tag, partOf(own, chunk.begin, chunk.bytes), {});
    } else if (pieces.atRoot()) {
      builder.send(chunk.child, chunk.tag, partOf(inputPiece(chunk.rank, bytes), chunk.begin, chunk.bytes), {});
    } else {
      forwarding.add(pieces.parent(), chunk.child, chunk.tag, chunk.bytes);
    }
  });
  return builder.take();
}

}  // namespace

Schedule buildScatter(const Shape& shape) { return buildRooted(shape, buildDirect, buildPacked, buildStreamed); }

}  // namespace trainmover
