// See schedule.h: checks the shape and hands it to the builder of its kind. Called by runtime/communicator.cc.
#include "collectives/schedule.h"

#include <stdexcept>
#include <string>

#include "collectives/builders.h"
#include "collectives/names.h"
#include "collectives/topology.h"

namespace trainmover {

namespace {

/// What one message may hold (wire/frame.h), and far more than any machine's memory; sums below it cannot overflow.
constexpr std::size_t kShapeBytesMax = std::size_t{1} << 40;

[[noreturn]] void refuse(const Shape& shape, const std::string& why) {
  throw std::invalid_argument(std::string(nameOf(shape.kind)) + " of a group of " + std::to_string(shape.size) + ": " +
                              why);
}

std::size_t expectedPieces(const Shape& shape) {
  switch (shape.kind) {
    case CollectiveKind::kBarrier:
      return 0;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllGather:
    case CollectiveKind::kAllToAll:
      return static_cast<std::size_t>(shape.size);
    default:
      return 1;
  }
}

void validateTotal(const Shape& shape, const std::vector<std::size_t>& pieces, std::size_t unit) {
  std::size_t total = 0;
  for (std::size_t piece : pieces) {
    if (piece > kShapeBytesMax / unit || (total += piece * unit) > kShapeBytesMax) {
      refuse(shape, "more than " + std::to_string(kShapeBytesMax) +
                        " bytes in one call; is a count negative? Call it on smaller parts");
    }
  }
}

}  // namespace

void validateShape(const Shape& shape) {
  if (shape.size < 1) refuse(shape, "expected at least one rank");
  if (shape.rank < 0 || shape.rank >= shape.size) {
    refuse(shape, "rank " + std::to_string(shape.rank) + " is not in it; expected 0 <= rank < size");
  }
  if (shape.root < 0 || shape.root >= shape.size) {
    refuse(shape, "root " + std::to_string(shape.root) + " is not in it; pass the root as a rank of the group");
  }
  const std::size_t expected = expectedPieces(shape);
  if (shape.pieces.size() != expected) {
    refuse(shape, std::to_string(shape.pieces.size()) + " pieces, expected " + std::to_string(expected));
  }
  const bool all_to_all = shape.kind == CollectiveKind::kAllToAll;
  if (shape.received.size() != (all_to_all ? expected : 0)) {
    refuse(shape, std::to_string(shape.received.size()) + " received pieces, expected " +
                      std::to_string(all_to_all ? expected : 0) + "; only an all-to-all has them");
  }
  if (all_to_all) {
    const std::size_t own = static_cast<std::size_t>(shape.rank);
    if (shape.pieces[own] != shape.received[own]) {
      refuse(shape, "rank " + std::to_string(shape.rank) + " gives itself " + std::to_string(shape.pieces[own]) +
                        " bytes but expects " + std::to_string(shape.received[own]) + " from itself");
    }
  }
  const bool reduces = shape.kind == CollectiveKind::kAllReduce || shape.kind == CollectiveKind::kReduce ||
                       shape.kind == CollectiveKind::kReduceScatter;
  if (!reduces && shape.dtype != DataType::kUInt8) {
    refuse(shape, "it only moves data, so its pieces are counted in bytes; expected data type kUInt8");
  }
  const std::size_t unit = elementBytes(shape.dtype);
  if (unit == 0) refuse(shape, "unknown data type " + std::to_string(static_cast<int>(shape.dtype)));
  validateTotal(shape, shape.pieces, unit);
  validateTotal(shape, shape.received, unit);
}

Schedule buildSchedule(const Shape& shape) {
  validateShape(shape);
  switch (shape.kind) {
    case CollectiveKind::kAllReduce:
      return buildAllReduce(shape);
    case CollectiveKind::kReduce:
      return buildReduce(shape);
    case CollectiveKind::kReduceScatter:
      return buildReduceScatter(shape);
    case CollectiveKind::kAllGather:
      return buildAllGather(shape);
    case CollectiveKind::kBroadcast:
      return buildBroadcast(shape);
    case CollectiveKind::kGather:
      return buildGather(shape);
    case CollectiveKind::kScatter:
      return buildScatter(shape);
    case CollectiveKind::kAllToAll:
      if (shape.size > kDirectSize) {
        refuse(shape, "more ranks than are linked directly; build it with the two functions of all_to_all.h");
      }
      return buildAllToAllDirect(shape);
    case CollectiveKind::kBarrier:
      return buildBarrier(shape);
  }
  refuse(shape, "unknown kind " + std::to_string(static_cast<int>(shape.kind)));
}

}  // namespace trainmover
