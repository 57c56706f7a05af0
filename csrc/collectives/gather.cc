// Gather of equal pieces: each straight to the root where all are linked directly, else up a binomial tree. Called by
// schedule.cc.
#include "collectives/builders.h"
#include "collectives/forwarding.h"
#include "collectives/schedule_builder.h"
#include "collectives/topology.h"
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
  const int v = tree.relative(shape.rank);
  const std::size_t chunk = pipelineChunkBytes(bytes);
  const std::size_t chunks = partsOf(bytes, chunk);
  ScheduleBuilder builder(shape, 2 * chunks * static_cast<std::size_t>(tree.span(v)));
  Forwarding forwarding(builder, chunk);
  const int parent = tree.absolute(tree.parent(v));
  if (v == 0) builder.copy(inputPiece(0, bytes), outputPiece(shape.rank, bytes), {});
  for (int giver = v; giver < v + tree.span(v); ++giver) {
    const int from = giver == v ? -1 : tree.absolute(tree.childTowards(v, giver));
    for (std::size_t index = 0; index < chunks; ++index) {
      const Slice part = chunkOf(bytes, chunk, index);
      const std::size_t length = part.end - part.begin;
      const std::uint64_t tag = static_cast<std::uint64_t>(giver) * chunks + index;
      if (giver != v && v != 0) {
        forwarding.add(from, parent, tag, length);
      } else if (giver != v) {
        builder.receive(from, tag, partOf(outputPiece(tree.absolute(giver), bytes), part.begin, length), {});
      } else if (v != 0) {
        builder.send(parent, tag, partOf(inputPiece(0, bytes), part.begin, length), {});
      }
    }
  }
  return builder.take();
}

}  // namespace

Schedule buildGather(const Shape& shape) {
  const std::size_t bytes = shape.pieces[0];
  if (bytes == 0) return Schedule{};
  if (shape.size <= kDirectSize) return buildDirect(shape, bytes);
  return bytes <= kPackedBytesMax / static_cast<std::size_t>(shape.size) ? buildPacked(shape, bytes)
                                                                         : buildStreamed(shape, bytes);
}

}  // namespace trainmover
