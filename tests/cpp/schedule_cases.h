// Collectives to run in a simulation, with the memory of all ranks and what must be in it afterwards. Used by
// schedule_test.cc.
#pragma once

#include <deque>
#include <vector>

#include "check.h"
#include "collectives/all_to_all.h"
#include "collectives/reduction_order.h"
#include "schedule_arithmetic.h"
#include "schedule_simulation.h"

namespace trainmover::simulation {

inline bool isReduction(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

/// One collective. `pieces` as in Shape; for kAllToAll, piece [from * size + to].
struct Case {
  CollectiveKind kind;
  int size;
  std::vector<std::size_t> pieces;
  DataType dtype = DataType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  bool own_in_place = false;  // a rank's own part is the same memory on both sides

  std::size_t unit() const { return elementBytes(dtype); }
  std::size_t piece(int index) const { return pieces[static_cast<std::size_t>(index)]; }

  Shape shapeOf(int rank) const {
    Shape shape{kind, size, rank, root, dtype, op, pieces, {}};
    if (kind != CollectiveKind::kAllToAll) return shape;
    shape.pieces.clear();
    for (int peer = 0; peer < size; ++peer) {
      shape.pieces.push_back(piece(rank * size + peer));
      shape.received.push_back(piece(peer * size + rank));
    }
    return shape;
  }
};

/// The memory of a case.
class World {
 public:
  World(const Case& test, std::uint64_t seed) : case_(test), random_(seed) {
    for (int rank = 0; rank < test.size; ++rank) addRank(rank);
  }

  std::vector<Rank>& ranks() { return ranks_; }

  /// The bytes of all outputs of `rank`, one piece after the other.
  Bytes outputs(int rank) const { return joined(ranks_[static_cast<std::size_t>(rank)].outputs); }

  /// What all outputs of `rank` must be.
  Bytes expected(int rank) {
    const int size = case_.size;
    Bytes all;
    const auto append = [&](const Bytes& bytes) { all.insert(all.end(), bytes.begin(), bytes.end()); };
    switch (case_.kind) {
      case CollectiveKind::kAllReduce:
        return expectedVector(reductionOrder(case_.pieces[0] * case_.unit(), size));
      case CollectiveKind::kReduce:
        return rank == case_.root ? expectedVector(ReductionOrder::kTree) : Bytes{};
      case CollectiveKind::kReduceScatter:
        return expectedPiece(rank);
      case CollectiveKind::kAllGather:
      case CollectiveKind::kGather:
        if (case_.kind == CollectiveKind::kGather && rank != case_.root) return all;
        for (int giver = 0; giver < size; ++giver) append(given(giver));
        return all;
      case CollectiveKind::kBroadcast:
        return given(case_.root);
      case CollectiveKind::kScatter: {
        const auto first = given(case_.root).begin() + static_cast<std::ptrdiff_t>(case_.pieces[0]) * rank;
        return Bytes(first, first + static_cast<std::ptrdiff_t>(case_.pieces[0]));
      }
      case CollectiveKind::kAllToAll:
        for (int giver = 0; giver < size; ++giver) {
          std::size_t begin = 0;
          for (int to = 0; to < rank; ++to) begin += case_.piece(giver * size + to);
          const auto first = given(giver).begin() + static_cast<std::ptrdiff_t>(begin);
          append(Bytes(first, first + static_cast<std::ptrdiff_t>(case_.piece(giver * size + rank))));
        }
        return all;
      case CollectiveKind::kBarrier:
        return all;
    }
    return all;
  }

 private:
  static Bytes joined(const std::vector<Piece>& pieces) {
    Bytes all;
    for (const Piece& piece : pieces) all.insert(all.end(), piece.data, piece.data + piece.bytes);
    return all;
  }

  const Bytes& given(int rank) const { return given_[static_cast<std::size_t>(rank)]; }

  Piece newPiece(std::size_t count) {
    memory_.emplace_back(count * case_.unit());
    return Piece{memory_.back().data(), memory_.back().size()};
  }

  /// Floats of very different magnitude, so that sums in another order round differently; never infinite.
  void fill(const Piece& piece) {
    const std::size_t unit = case_.unit();
    for (std::size_t i = 0; i < piece.bytes / unit; ++i) {
      const std::uint64_t bits = nextRandom();
      const std::uint32_t exponent = 120 + static_cast<std::uint32_t>(bits >> 60);
      const std::uint32_t number = (static_cast<std::uint32_t>(bits) & 0x807FFFFF) | exponent << 23;
      unsigned char* at = piece.data + i * unit;
      if (case_.dtype == DataType::kFloat32) {
        store(at, number);
      } else if (case_.dtype == DataType::kBFloat16) {
        store(at, static_cast<std::uint16_t>(number >> 16));
      } else if (case_.dtype == DataType::kInt64) {
        store(at, bits);
      } else {
        *at = static_cast<unsigned char>(bits);
      }
    }
  }

  /// splitmix64, since there is much to fill.
  std::uint64_t nextRandom() {
    std::uint64_t bits = random_ += 0x9E3779B97F4A7C15U;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBU;
    return bits ^ bits >> 31;
  }

  void addRank(int index) {
    Rank rank;
    rank.shape = case_.shapeOf(index);
    addPieces(rank, index);
    const bool always = case_.kind == CollectiveKind::kAllReduce || case_.kind == CollectiveKind::kBroadcast;
    if ((always || case_.own_in_place) && !rank.inputs.empty() && !rank.outputs.empty()) {
      const auto own = [&](const std::vector<Piece>& pieces) { return pieces.size() == 1 ? 0 : index; };
      rank.outputs[static_cast<std::size_t>(own(rank.outputs))] =
          rank.inputs[static_cast<std::size_t>(own(rank.inputs))];
    }
    for (const Piece& piece : rank.inputs) fill(piece);
    given_.push_back(joined(rank.inputs));
    ranks_.push_back(std::move(rank));
  }

  /// As the table at Shape says.
  void addPieces(Rank& rank, int index) {
    const bool root = index == case_.root;
    const auto add = [&](std::vector<Piece>& pieces, const std::vector<std::size_t>& counts) {
      for (std::size_t count : counts) pieces.push_back(newPiece(count));
    };
    switch (case_.kind) {
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kReduce:
        add(rank.inputs, case_.pieces);
        if (case_.kind != CollectiveKind::kReduce || root) add(rank.outputs, case_.pieces);
        return;
      case CollectiveKind::kReduceScatter:
        add(rank.inputs, case_.pieces);
        return add(rank.outputs, {case_.piece(index)});
      case CollectiveKind::kAllGather:
        add(rank.inputs, {case_.piece(index)});
        return add(rank.outputs, case_.pieces);
      case CollectiveKind::kGather:
        add(rank.inputs, case_.pieces);
        if (root) add(rank.outputs, std::vector<std::size_t>(static_cast<std::size_t>(case_.size), case_.piece(0)));
        return;
      case CollectiveKind::kScatter:
        if (root) add(rank.inputs, std::vector<std::size_t>(static_cast<std::size_t>(case_.size), case_.piece(0)));
        return add(rank.outputs, case_.pieces);
      case CollectiveKind::kAllToAll:
        add(rank.inputs, rank.shape.pieces);
        return add(rank.outputs, rank.shape.received);
      case CollectiveKind::kBarrier:
        return;
    }
  }

  /// The same on all ranks, so worked out once.
  const Bytes& expectedVector(ReductionOrder order) {
    Bytes& all = expected_vector_;
    if (!all.empty()) return all;
    for (int owner = 0; owner < case_.size; ++owner) {
      const Slice slice = sliceOf(case_.pieces[0], case_.size, owner);
      const Bytes part = expectedReduction(case_.dtype, case_.op, given_, order, owner, slice);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  Bytes expectedPiece(int rank) const {
    Slice slice;
    std::size_t count = 0;
    for (int piece = 0; piece < case_.size; ++piece) {
      if (piece == rank) slice = Slice{count, count + case_.piece(piece)};
      count += case_.piece(piece);
    }
    return expectedReduction(case_.dtype, case_.op, given_, reductionOrder(count * case_.unit(), case_.size), rank,
                             slice);
  }

  Case case_;
  std::uint64_t random_;
  std::deque<Bytes> memory_;
  std::vector<Bytes> given_;  // [rank]: all it gave, before anything ran
  Bytes expected_vector_;
  std::vector<Rank> ranks_;
};

/// The two schedules of a forwarded all-to-all, as all_to_all.h tells the runtime to run them.
inline void buildForwarded(std::vector<Rank>& ranks, std::uint64_t seed) {
  const std::size_t size = ranks.size();
  std::vector<std::vector<std::uint64_t>> own(size);
  std::vector<Rank> exchange(size);
  for (std::size_t r = 0; r < size; ++r) {
    for (std::size_t delta = 0; delta < size; ++delta) own[r].push_back(ranks[r].shape.pieces[(r + delta) % size]);
    exchange[r].shape = ranks[r].shape;
    exchange[r].schedule = buildAllToAllSizes(ranks[r].shape);
    exchange[r].inputs = ranks[r].inputs;
    exchange[r].inputs.push_back(Piece{reinterpret_cast<unsigned char*>(own[r].data()), size * sizeof(std::uint64_t)});
    exchange[r].outputs = ranks[r].outputs;
  }
  runAll(exchange, seed);
  for (std::size_t r = 0; r < size; ++r) {
    std::vector<std::uint64_t> sizes(allToAllSizeCount(static_cast<int>(size)));
    std::memcpy(sizes.data(), exchange[r].scratch.data(), sizes.size() * sizeof(std::uint64_t));
    ranks[r].schedule = buildAllToAllData(ranks[r].shape, sizes);
  }
}

/// Builds, checks and runs `test`, and compares every output bit for bit.
inline void runCase(const Case& test, std::uint64_t seed = 1) {
  World world(test, seed);
  if (test.kind == CollectiveKind::kAllToAll && test.size > kDirectSize) {
    buildForwarded(world.ranks(), seed);
  } else {
    for (Rank& rank : world.ranks()) rank.schedule = buildSchedule(rank.shape);
  }
  runAll(world.ranks(), seed);
  for (int rank = 0; rank < test.size; ++rank) {
    const Bytes found = world.outputs(rank);
    const Bytes expected = world.expected(rank);
    require(found == expected, test.shapeOf(rank), 0, "another result than the order gives");
  }
}

}  // namespace trainmover::simulation
