// Broadcast, in place, in chunks: down a binomial tree, or, when there is so much that what the root can send counts
// for more than the number of hops, from rank to rank. Called by schedule.cc.
#include "collectives/builders.h"
#include "collectives/schedule_builder.h"
#include "collectives/tree.h"

namespace trainmover {

Schedule buildBroadcast(const Shape& shape) {
  const std::size_t bytes = shape.pieces[0];
  if (shape.size == 1 || bytes == 0) return Schedule{};
  const RootedTree tree(shape.size, shape.root);
  const int v = tree.relative(shape.rank);
  const bool chain = bytes >= kRingBytesPerRank * static_cast<std::size_t>(shape.size);

  const int parent = tree.absolute(chain ? v - (v > 0) : tree.parent(v));
  std::vector<int> children;
  if (chain) {
    if (v + 1 < shape.size) children.push_back(tree.absolute(v + 1));
  } else {
    for (int distance = tree.firstChildDistance(v); distance >= 1; distance /= 2) {
      children.push_back(tree.absolute(v + distance));
    }
  }

  const std::size_t chunk = pipelineChunkBytes(bytes);
  const std::size_t chunks = partsOf(bytes, chunk);
  ScheduleBuilder builder(shape, chunks * (children.size() + 1));
  for (std::size_t index = 0; index < chunks; ++index) {
    const Slice part = chunkOf(bytes, chunk, index);
    const Region region = partOf(outputPiece(0, bytes), part.begin, part.end - part.begin);
    const StepId got = v == 0 ? kNoStep : builder.receive(parent, index, region, {});
    for (int child : children) builder.send(child, index, region, {got});
  }
  return builder.take();
}

}  // namespace trainmover
