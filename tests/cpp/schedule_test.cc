// Tests of collectives/schedule.h: the schedules of all ranks run together in a simulation, and every result is
// compared bit for bit with the order that reduction_order.h gives.
#include "collectives/schedule.h"

#include <random>
#include <stdexcept>
#include <vector>

#include "base/errors.h"
#include "check.h"
#include "collectives/all_to_all.h"
#include "collectives/reduction_order.h"
#include "collectives/topology.h"
#include "schedule_cases.h"

namespace trainmover::simulation {
namespace {

const std::vector<int> kSizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33};
const std::vector<DataType> kTypes{DataType::kFloat32, DataType::kBFloat16, DataType::kInt64};

/// Calls `body(dtype, op)` for each type, and the averages of floats.
template <typename Body>
void forArithmetic(Body body) {
  for (DataType dtype : kTypes) body(dtype, ReduceOp::kSum);
  body(DataType::kFloat32, ReduceOp::kAverage);
  body(DataType::kBFloat16, ReduceOp::kAverage);
}

/// Counts of `total` elements in pieces of very different sizes, some empty.
std::vector<std::size_t> unevenPieces(int size, std::size_t total, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::size_t> pieces(static_cast<std::size_t>(size), 0);
  for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
    pieces[i] = random() % 3 == 0 ? 0 : random() % (total / 2 + 1);
    total -= pieces[i];
  }
  pieces.back() = total;
  return pieces;
}

std::size_t elementsIn(std::size_t bytes, DataType dtype) { return bytes / elementBytes(dtype); }

TEST(slices_cover_the_vector_in_order) {
  for (int size : kSizes) {
    for (std::size_t count : {0, 1, 15, 16, 17, 100, 4096, 5000}) {
      std::size_t end = 0;
      for (int owner = 0; owner < size; ++owner) {
        const Slice slice = sliceOf(count, size, owner);
        CHECK_EQ(slice.begin, end);
        CHECK(slice.end >= slice.begin);
        CHECK(slice.begin % 16 == 0 || slice.begin == count);
        end = slice.end;
      }
      CHECK_EQ(end, count);
    }
  }
}

TEST(small_vectors_go_up_the_tree_and_large_ones_round_the_ring) {
  CHECK(reductionOrder(kRingBytesPerRank * 4 - 1, 4) == ReductionOrder::kTree);
  CHECK(reductionOrder(kRingBytesPerRank * 4, 4) == ReductionOrder::kRing);
}

TEST(all_reduce_by_doubling_and_halving) {
  for (int size : kSizes) {
    forArithmetic([&](DataType dtype, ReduceOp op) {
      if (op == ReduceOp::kAverage && size > 7) return;
      const std::size_t unit = elementBytes(dtype);
      for (std::size_t bytes : {std::size_t{0}, unit, 15 * unit, 1000 * unit, std::size_t{16} << 10,
                                (std::size_t{16} << 10) + unit, std::size_t{40000}}) {
        runCase({CollectiveKind::kAllReduce, size, {bytes / unit}, dtype, op}, bytes);
      }
    });
  }
}

TEST(all_reduce_by_halving_just_below_the_ring) {
  for (int size : {2, 3, 5, 8, 9}) {
    for (DataType dtype : kTypes) {
      const std::size_t count = elementsIn(kRingBytesPerRank * static_cast<std::size_t>(size), dtype) - 1;
      runCase({CollectiveKind::kAllReduce, size, {count}, dtype});
    }
  }
}

TEST(all_reduce_in_more_segments_than_have_scratch_of_their_own) {
  // 33 ranks and just below the ring: nine segments for eight.
  const std::size_t count = elementsIn(kRingBytesPerRank * 33, DataType::kBFloat16) - 1;
  runCase({CollectiveKind::kAllReduce, 33, {count}, DataType::kBFloat16});
}

TEST(all_reduce_round_the_ring) {
  for (int size : {2, 3, 4, 5, 9}) {
    forArithmetic([&](DataType dtype, ReduceOp op) {
      if (op == ReduceOp::kAverage && size > 5) return;
      const std::size_t count = elementsIn(kRingBytesPerRank * static_cast<std::size_t>(size), dtype);
      runCase({CollectiveKind::kAllReduce, size, {count}, dtype, op});
      if (size <= 3) runCase({CollectiveKind::kAllReduce, size, {3 * count + 7}, dtype, op});
    });
  }
}

TEST(all_reduce_round_the_ring_in_more_columns_than_lanes) {
  for (int size : {2, 3, 4}) {
    const std::size_t slice_bytes = std::size_t{700} << 10;
    const std::size_t count = elementsIn(slice_bytes * static_cast<std::size_t>(size), DataType::kBFloat16);
    runCase({CollectiveKind::kAllReduce, size, {count + 5}, DataType::kBFloat16});
    runCase({CollectiveKind::kAllReduce, size, {count / 2 + 5}, DataType::kFloat32, ReduceOp::kAverage});
  }
}

TEST(reduce_to_every_root) {
  for (int size : kSizes) {
    for (int root = 0; root < size; root += size > 9 ? 3 : 1) {
      for (const bool in_place : {false, true}) {
        forArithmetic([&](DataType dtype, ReduceOp op) {
          runCase({CollectiveKind::kReduce, size, {333}, dtype, op, root, in_place});
        });
      }
    }
  }
}

TEST(reduce_of_large_vectors_in_chunks_follows_the_tree) {
  for (int size : {2, 3, 6}) {
    for (const bool in_place : {false, true}) {
      for (DataType dtype : kTypes) {
        const std::size_t count = elementsIn(std::size_t{900} << 10, dtype) + 3;
        runCase({CollectiveKind::kReduce, size, {count}, dtype, ReduceOp::kSum, size - 1, in_place});
      }
    }
  }
}

TEST(reduce_scatter_of_even_and_uneven_pieces) {
  for (int size : kSizes) {
    for (const bool in_place : {false, true}) {
      forArithmetic([&](DataType dtype, ReduceOp op) {
        const std::size_t parts = static_cast<std::size_t>(size);
        runCase({CollectiveKind::kReduceScatter, size, std::vector<std::size_t>(parts, 0), dtype, op, 0, in_place});
        runCase({CollectiveKind::kReduceScatter, size, std::vector<std::size_t>(parts, 37), dtype, op, 0, in_place});
        for (std::uint64_t seed : {1, 2}) {
          const auto pieces = unevenPieces(size, 3000, seed);
          runCase({CollectiveKind::kReduceScatter, size, pieces, dtype, op, 0, in_place}, seed);
        }
      });
    }
  }
}

TEST(reduce_scatter_by_halving_just_below_the_ring) {
  for (int size : {3, 8, 9}) {
    for (DataType dtype : {DataType::kBFloat16, DataType::kInt64}) {
      const std::size_t count = elementsIn(kRingBytesPerRank * static_cast<std::size_t>(size), dtype) - 1;
      runCase({CollectiveKind::kReduceScatter, size, unevenPieces(size, count, 3), dtype, ReduceOp::kSum, 0, true});
    }
  }
}

TEST(reduce_scatter_round_the_ring) {
  for (int size : {2, 3, 5, 9}) {
    for (const bool in_place : {false, true}) {
      forArithmetic([&](DataType dtype, ReduceOp op) {
        if (size > 5 && (in_place || op == ReduceOp::kAverage)) return;
        const std::size_t count = elementsIn(kRingBytesPerRank, dtype);
        const std::vector<std::size_t> even(static_cast<std::size_t>(size), count);
        runCase({CollectiveKind::kReduceScatter, size, even, dtype, op, 0, in_place});
        const auto pieces = unevenPieces(size, count * static_cast<std::size_t>(size) + 1, 4);
        runCase({CollectiveKind::kReduceScatter, size, pieces, dtype, op, 0, in_place});
      });
    }
  }
}

TEST(all_gather_of_even_and_uneven_pieces) {
  for (int size : kSizes) {
    const std::size_t parts = static_cast<std::size_t>(size);
    for (const bool in_place : {false, true}) {
      for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, kRingBytesPerRank + 5}) {
        if (bytes > kRingBytesPerRank && size > (in_place ? 5 : 12)) continue;
        const std::vector<std::size_t> even(parts, bytes);
        runCase({CollectiveKind::kAllGather, size, even, DataType::kUInt8, ReduceOp::kSum, 0, in_place});
        const auto pieces = unevenPieces(size, bytes * parts, bytes);
        runCase({CollectiveKind::kAllGather, size, pieces, DataType::kUInt8, ReduceOp::kSum, 0, in_place});
      }
    }
  }
}

TEST(rooted_operations_from_every_root) {
  for (CollectiveKind kind : {CollectiveKind::kBroadcast, CollectiveKind::kGather, CollectiveKind::kScatter}) {
    for (int size : kSizes) {
      for (int root = 0; root < size; ++root) {
        for (const bool in_place : {false, true}) {
          for (std::size_t bytes : {0, 1, 777}) {
            runCase({kind, size, {bytes}, DataType::kUInt8, ReduceOp::kSum, root, in_place});
          }
        }
      }
    }
  }
}

TEST(rooted_operations_on_large_data) {
  for (CollectiveKind kind : {CollectiveKind::kBroadcast, CollectiveKind::kGather, CollectiveKind::kScatter}) {
    for (int size : {2, 9, 11}) {
      for (int root : {0, size - 1}) {
        runCase({kind, size, {(std::size_t{140} << 10) + 3}, DataType::kUInt8, ReduceOp::kSum, root, root > 0});
        if (size > 9 && kind != CollectiveKind::kBroadcast) continue;
        runCase({kind, size, {(std::size_t{1} << 20) + 3}, DataType::kUInt8, ReduceOp::kSum, root, root > 0});
      }
    }
  }
}

TEST(all_to_all_of_uneven_blocks_some_of_them_empty) {
  for (int size : kSizes) {
    for (std::uint64_t seed : {1, 2, 3}) {
      std::mt19937_64 random(seed);
      std::vector<std::size_t> blocks;
      for (int i = 0; i < size * size; ++i) {
        const std::uint64_t drawn = random();
        const std::size_t most = drawn % 40 == 0 && size < 20 ? 40000 : 600;
        blocks.push_back(drawn % 3 == 0 ? 0 : (drawn >> 8) % most);
      }
      runCase({CollectiveKind::kAllToAll, size, blocks}, seed);
    }
  }
}

TEST(all_to_all_of_even_and_large_blocks) {
  for (int size : {2, 9, 12}) {
    const std::size_t pairs = static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
    runCase({CollectiveKind::kAllToAll, size, std::vector<std::size_t>(pairs, 0)});
    runCase({CollectiveKind::kAllToAll, size, std::vector<std::size_t>(pairs, 15000)});
    std::vector<std::size_t> blocks(pairs, 100);
    blocks[1] = 2 * kChunkBytes + 1;
    blocks[static_cast<std::size_t>(size) - 1] = kChunkBytes;
    runCase({CollectiveKind::kAllToAll, size, blocks});
  }
}

TEST(all_to_all_refuses_sizes_that_contradict_the_call) {
  const std::size_t ranks = 9;
  Shape shape{CollectiveKind::kAllToAll, 9, 2, 0, DataType::kUInt8, ReduceOp::kSum, {}, {}};
  shape.pieces.assign(ranks, 5);
  shape.received.assign(ranks, 5);
  CHECK_THROWS(buildSchedule(shape), std::invalid_argument);
  CHECK_THROWS(buildAllToAllData(shape, {1, 2}), std::invalid_argument);
  const std::size_t count = allToAllSizeCount(9);
  CHECK(!buildAllToAllData(shape, std::vector<std::uint64_t>(count, 5)).steps.empty());
  CHECK_THROWS(buildAllToAllData(shape, std::vector<std::uint64_t>(count, 6)), CollectiveMismatch);
  CHECK_THROWS(buildAllToAllData(shape, std::vector<std::uint64_t>(count, ~std::uint64_t{0})), CollectiveMismatch);
}

TEST(nobody_leaves_a_barrier_before_all_have_come) {
  for (int size = 1; size <= 17; ++size) {
    runCase({CollectiveKind::kBarrier, size, {}});
    for (int missing = 0; size > 1 && missing < size; ++missing) {
      World world({CollectiveKind::kBarrier, size, {}}, 1);
      for (Rank& rank : world.ranks()) rank.schedule = buildSchedule(rank.shape);
      Simulation simulation(world.ranks(), 1, missing);
      simulation.run();
      for (std::size_t rank = 0; rank < world.ranks().size(); ++rank) CHECK(simulation.unfinishedSteps(rank) > 0);
    }
  }
}

/// All kinds but kAllToAll, which takes other arguments, with about `bytes` a rank.
std::vector<Case> casesOf(int size, std::size_t bytes, int root) {
  const std::vector<std::size_t> each(static_cast<std::size_t>(size), bytes / 2);
  return {{CollectiveKind::kAllReduce, size, {bytes / 2 * static_cast<std::size_t>(size)}, DataType::kBFloat16},
          {CollectiveKind::kReduce, size, {bytes}, DataType::kBFloat16, ReduceOp::kSum, root},
          {CollectiveKind::kReduceScatter, size, each, DataType::kBFloat16},
          {CollectiveKind::kAllGather, size, each},
          {CollectiveKind::kBroadcast, size, {bytes}, DataType::kUInt8, ReduceOp::kSum, root},
          {CollectiveKind::kGather, size, {bytes}, DataType::kUInt8, ReduceOp::kSum, root},
          {CollectiveKind::kScatter, size, {bytes}, DataType::kUInt8, ReduceOp::kSum, root},
          {CollectiveKind::kBarrier, size, {}}};
}

void checkAllKinds(int size, int rank, std::size_t bytes, int root) {
  for (const Case& test : casesOf(size, bytes, root)) {
    const Shape shape = test.shapeOf(rank);
    checkSteps(shape, buildSchedule(shape));
  }
  const std::size_t ranks = static_cast<std::size_t>(size);
  Shape shape{CollectiveKind::kAllToAll, size, rank, 0, DataType::kUInt8, ReduceOp::kSum, {}, {}};
  shape.pieces.assign(ranks, bytes);
  shape.received.assign(ranks, bytes);
  if (size <= kDirectSize) return checkSteps(shape, buildSchedule(shape));
  checkSteps(shape, buildAllToAllSizes(shape));
  checkSteps(shape, buildAllToAllData(shape, std::vector<std::uint64_t>(allToAllSizeCount(size), bytes)));
}

TEST(schedules_use_the_links_of_the_topology_only_in_groups_up_to_64) {
  for (int size = 1; size <= 64; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      checkAllKinds(size, rank, 8, size / 3);
      if (size % 8 == 1) checkAllKinds(size, rank, std::size_t{20} << 10, size / 3);
      if (size % 13 == 0) checkAllKinds(size, rank, 2 * kRingBytesPerRank, size - 1);
    }
  }
}

TEST(schedules_use_the_links_of_the_topology_only_in_large_groups) {
  for (int size : {100, 128, 255, 256, 1000, 1024}) {
    for (int rank : {0, 1, size / 2, size - 1}) checkAllKinds(size, rank, 64, size / 3);
    checkAllKinds(size, size / 3 + 1, 2 * kRingBytesPerRank, size / 3);
    // The most scratch that halving takes.
    checkAllKinds(size, size / 3 + 2, kRingBytesPerRank - 2, size / 3);
  }
}

TEST(scratch_does_not_grow_with_the_vector) {
  const std::size_t count = std::size_t{2} << 30;
  for (CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduce}) {
    const Shape shape{kind, 8, 0, 0, DataType::kBFloat16, ReduceOp::kSum, {count}, {}};
    CHECK(buildSchedule(shape).scratch_bytes <= kScratchBytesMax);
  }
}

TEST(shapes_that_contradict_themselves_are_refused) {
  const Shape good{CollectiveKind::kAllReduce, 4, 1, 0, DataType::kFloat32, ReduceOp::kSum, {8}, {}};
  CHECK(!buildSchedule(good).steps.empty());
  const auto refused = [&](auto change) {
    Shape shape = good;
    change(shape);
    CHECK_THROWS(buildSchedule(shape), std::invalid_argument);
  };
  refused([](Shape& shape) { shape.size = 0; });
  refused([](Shape& shape) { shape.rank = 4; });
  refused([](Shape& shape) { shape.rank = -1; });
  refused([](Shape& shape) { shape.root = 4; });
  refused([](Shape& shape) { shape.pieces.clear(); });
  refused([](Shape& shape) { shape.pieces.push_back(8); });
  refused([](Shape& shape) { shape.received.push_back(8); });
  refused([](Shape& shape) { shape.pieces[0] = ~std::size_t{0}; });
  refused([](Shape& shape) { shape.kind = CollectiveKind::kBarrier; });
  refused([](Shape& shape) { shape.kind = CollectiveKind::kBroadcast; });  // in elements
  refused([](Shape& shape) { shape.kind = CollectiveKind::kReduceScatter; });
  refused([](Shape& shape) {
    shape = Shape{CollectiveKind::kAllToAll, 2, 0, 0, DataType::kUInt8, ReduceOp::kSum, {1, 2}, {2, 1}};
  });
}

}  // namespace
}  // namespace trainmover::simulation
