#include "runtime/call_shape.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "collectives/names.h"
#include "reduce/kernels.h"

namespace trainmover {
namespace {

[[noreturn]] void reject(const CollectiveCall& call, const std::string& what) {
  throw std::invalid_argument(std::string(nameOf(call.kind)) + ": " + what);
}

bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

void requireCounts(const CollectiveCall& call, std::size_t inputs, std::size_t outputs) {
  if (call.inputs.size() == inputs && call.outputs.size() == outputs) return;
  reject(call, "found " + std::to_string(call.inputs.size()) + " inputs and " + std::to_string(call.outputs.size()) +
                   " outputs, expected " + std::to_string(inputs) + " and " + std::to_string(outputs));
}

void requireEqual(const CollectiveCall& call, const std::vector<Buffer>& pieces, std::size_t bytes) {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].bytes != bytes) {
      reject(call, "piece " + std::to_string(i) + " has " + std::to_string(pieces[i].bytes) + " bytes, expected " +
                       std::to_string(bytes) + ", as all the others");
    }
  }
}

std::vector<std::size_t> countsOf(const CollectiveCall& call, const std::vector<Buffer>& pieces) {
  const std::size_t element = reduces(call.kind) ? elementBytes(call.dtype) : 1;
  std::vector<std::size_t> counts;
  counts.reserve(pieces.size());
  for (const Buffer& piece : pieces) {
    if (piece.bytes % element != 0) {
      reject(call, std::to_string(piece.bytes) + " bytes are not a whole number of elements of " +
                       std::to_string(element) + " bytes");
    }
    counts.push_back(piece.bytes / element);
  }
  return counts;
}

void checkBuffers(const CollectiveCall& call, std::size_t size, bool at_root) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      requireCounts(call, call.inputs.empty() ? 0 : 1, 1);
      return requireEqual(call, call.inputs, call.outputs[0].bytes);
    case CollectiveKind::kReduce:
      requireCounts(call, 1, at_root ? 1 : 0);
      return requireEqual(call, call.outputs, call.inputs[0].bytes);
    case CollectiveKind::kReduceScatter:
      return requireCounts(call, size, 1);
    case CollectiveKind::kAllGather:
      return requireCounts(call, 1, size);
    case CollectiveKind::kBroadcast:
      return requireCounts(call, 0, 1);
    case CollectiveKind::kGather:
      requireCounts(call, 1, at_root ? size : 0);
      return requireEqual(call, call.outputs, call.inputs[0].bytes);
    case CollectiveKind::kScatter:
      requireCounts(call, at_root ? size : 0, 1);
      return requireEqual(call, call.inputs, call.outputs[0].bytes);
    case CollectiveKind::kAllToAll:
      return requireCounts(call, size, size);
    case CollectiveKind::kBarrier:
      return requireCounts(call, 0, 0);
  }
}

void requireOwnPiece(const CollectiveCall& call, std::size_t found, std::size_t expected) {
  if (found != expected) {
    reject(call, "this rank's own piece has " + std::to_string(found) + " bytes on one side and " +
                     std::to_string(expected) + " on the other");
  }
}

void copy(const Buffer& to, const Buffer& from) {
  if (to.data != from.data && to.bytes > 0) std::memmove(to.data, from.data, to.bytes);
}

}  // namespace

Shape shapeOf(const CollectiveCall& call, int size, int rank) {
  if (call.root < 0 || call.root >= size) {
    reject(call, "root " + std::to_string(call.root) + " is not a rank of a group of " + std::to_string(size));
  }
  checkBuffers(call, static_cast<std::size_t>(size), rank == call.root);
  if (reduces(call.kind) && !reducible(call.dtype, call.op)) {
    reject(call,
           "this operator is not defined for this element type (bit operations need integers, the average "
           "needs floating point)");
  }
  const auto own = static_cast<std::size_t>(rank);
  Shape shape{call.kind, size, rank, call.root, reduces(call.kind) ? call.dtype : DataType::kUInt8, call.op, {}, {}};
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kScatter:
      shape.pieces = countsOf(call, {call.outputs[0]});
      break;
    case CollectiveKind::kReduce:
    case CollectiveKind::kGather:
      shape.pieces = countsOf(call, {call.inputs[0]});
      break;
    case CollectiveKind::kReduceScatter:
      requireOwnPiece(call, call.inputs[own].bytes, call.outputs[0].bytes);
      shape.pieces = countsOf(call, call.inputs);
      break;
    case CollectiveKind::kAllGather:
      requireOwnPiece(call, call.outputs[own].bytes, call.inputs[0].bytes);
      shape.pieces = countsOf(call, call.outputs);
      break;
    case CollectiveKind::kAllToAll:
      requireOwnPiece(call, call.outputs[own].bytes, call.inputs[own].bytes);
      shape.pieces = countsOf(call, call.inputs);
      shape.received = countsOf(call, call.outputs);
      break;
    case CollectiveKind::kBarrier:
      break;
  }
  return shape;
}

void fillIsolated(const CollectiveCall& call, int size, int rank) {
  shapeOf(call, size, rank);
  const auto own = static_cast<std::size_t>(rank);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      if (!call.inputs.empty() && !call.outputs.empty()) copy(call.outputs[0], call.inputs[0]);
      return;
    case CollectiveKind::kReduceScatter:
      return copy(call.outputs[0], call.inputs[own]);
    case CollectiveKind::kScatter:
      if (!call.inputs.empty()) return copy(call.outputs[0], call.inputs[own]);
      if (call.outputs[0].bytes > 0) std::memset(call.outputs[0].data, 0, call.outputs[0].bytes);
      return;
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
    case CollectiveKind::kAllToAll:
      for (std::size_t i = 0; i < call.outputs.size(); ++i) {
        const Buffer& from = call.inputs[call.inputs.size() == 1 ? 0 : i];
        const std::size_t bytes = std::min(call.outputs[i].bytes, from.bytes);
        copy({call.outputs[i].data, bytes}, from);
        if (call.outputs[i].bytes > bytes) {
          std::memset(static_cast<unsigned char*>(call.outputs[i].data) + bytes, 0, call.outputs[i].bytes - bytes);
        }
      }
      return;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kBarrier:
      return;
  }
}

}  // namespace trainmover
