// The runtime in real processes: every collective gives the same bits over every transport.
#include <algorithm>

#include "collectives/names.h"
#include "collectives/schedule.h"
#include "runtime_calls.h"

namespace trainmover {
namespace {

using namespace check;

struct Case {
  CollectiveKind kind;
  DataType dtype;
  ReduceOp op;
  std::size_t count;  // elements of the whole vector
  int root;

  std::string text() const {
    return std::string(trainmover::nameOf(kind)) + " of " + std::to_string(count) + " elements, type " + show(dtype) +
           ", operator " + show(op) + ", root " + std::to_string(root);
  }
};

constexpr std::pair<DataType, ReduceOp> kReductions[] = {
    {DataType::kFloat32, ReduceOp::kSum},     {DataType::kBFloat16, ReduceOp::kSum},
    {DataType::kFloat32, ReduceOp::kAverage}, {DataType::kFloat16, ReduceOp::kAverage},
    {DataType::kFloat64, ReduceOp::kProduct}, {DataType::kInt32, ReduceOp::kSum},
    {DataType::kUInt8, ReduceOp::kMax},       {DataType::kFloat16, ReduceOp::kMin},
    {DataType::kInt64, ReduceOp::kBitXor},    {DataType::kBool, ReduceOp::kSum},
};
constexpr CollectiveKind kKinds[] = {
    CollectiveKind::kAllReduce, CollectiveKind::kReduce,    CollectiveKind::kReduceScatter,
    CollectiveKind::kAllGather, CollectiveKind::kBroadcast, CollectiveKind::kGather,
    CollectiveKind::kScatter,   CollectiveKind::kAllToAll,  CollectiveKind::kBarrier};

bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

// Bytes of the whole vector, round every size at which some path changes: nothing, slices of 16 elements, eager and
// doubling (16 KiB), everyone reduces (32 KiB by ranks), staged or in place (64 KiB), tree or ring (64 KiB a rank),
// several blocks of a slot (512 KiB), several chunks.
std::vector<std::size_t> sizesAround(std::size_t ranks) {
  const std::size_t kib = 1024;
  return {0,
          8,
          16 * 8 * ranks,
          16 * 8 * ranks + 8,
          16 * kib - 32,
          16 * kib,
          16 * kib + 8,
          32 * kib / ranks / 8 * 8,
          32 * kib / ranks / 8 * 8 + 8,
          64 * kib,
          64 * kib + 8,
          64 * kib * ranks - 8,
          64 * kib * ranks,
          64 * kib * ranks + 8,
          512 * kib + 4096 + 8,
          (ranks <= 3 ? 2560 : 1280) * kib + 24};
}

std::vector<Case> casesFor(int ranks) {
  std::vector<Case> cases;
  std::size_t turn = 0;
  for (const CollectiveKind kind : kKinds) {
    for (const std::size_t bytes : sizesAround(static_cast<std::size_t>(ranks))) {
      const auto& [dtype, op] = kReductions[turn++ % (sizeof kReductions / sizeof kReductions[0])];
      const DataType type = reduces(kind) ? dtype : DataType::kUInt8;
      cases.push_back({kind, type, op, bytes / elementBytes(type), static_cast<int>(turn) % ranks});
      if (kind == CollectiveKind::kBarrier) break;
    }
  }
  if (ranks > 3) return cases;  // many processes on few cores: the rest is left to the smaller groups
  // All thresholds again for what training uses most.
  for (const std::size_t bytes : sizesAround(static_cast<std::size_t>(ranks))) {
    cases.push_back({CollectiveKind::kAllReduce, DataType::kFloat32, ReduceOp::kSum, bytes / 4, 0});
    cases.push_back({CollectiveKind::kReduceScatter, DataType::kBFloat16, ReduceOp::kAverage, bytes / 2, 0});
  }
  return cases;
}

/// Fast also under sanitizers (xorshift, Marsaglia).
struct Random {
  explicit Random(std::uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
  std::uint64_t state;
};

// Small numbers mostly, so that rounding depends on the order; now and then any bits at all: infinities, NaNs.
std::uint64_t randomElement(DataType type, Random& random) {
  const std::uint64_t bits = random.next();
  if (type == DataType::kBool) return bits % 2;
  if (bits >> 58 == 0) return random.next();
  const double small = (static_cast<double>(bits % 20001) - 10000) / 3000;
  std::uint64_t element = bits;
  if (type == DataType::kFloat64) std::memcpy(&element, &small, sizeof element);
  if (type == DataType::kFloat32 || type == DataType::kBFloat16) {
    const float value = static_cast<float>(small);
    std::uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    element = type == DataType::kBFloat16 ? word >> 16 : word;
  }
  if (type == DataType::kFloat16) element = (bits % 2) << 15 | (13 + bits / 2 % 4) << 10 | bits / 8 % 1024;
  return element;
}

void fill(std::vector<unsigned char>& bytes, DataType type, Random& random) {
  const std::size_t element = elementBytes(type);
  for (std::size_t at = 0; at + element <= bytes.size(); at += element) {
    const std::uint64_t bits = randomElement(type, random);
    std::memcpy(&bytes[at], &bits, element);
  }
}

std::uint64_t hashOf(const std::vector<std::vector<unsigned char>>& pieces) {
  std::uint64_t hash = 14695981039346656037u;
  for (const auto& piece : pieces) {
    hash = (hash ^ piece.size()) * 1099511628211u;
    for (std::size_t at = 0; at < piece.size(); at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, &piece[at], std::min<std::size_t>(8, piece.size() - at));
      hash = (hash ^ word) * 1099511628211u;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

// Elements of the piece between rank `from` and rank `to`, uneven where that is allowed.
std::size_t pieceCount(const Case& one, int ranks, int from, int to) {
  const auto size = static_cast<std::size_t>(ranks);
  const std::size_t even = one.count / size;
  switch (one.kind) {
    case CollectiveKind::kReduceScatter:
      return static_cast<std::size_t>(to) + 1 == size ? one.count - even * (size - 1) : even;
    case CollectiveKind::kAllGather:
      return static_cast<std::size_t>(from) + 1 == size ? one.count - even * (size - 1) : even;
    case CollectiveKind::kAllToAll:
      return (from + to) % 3 == 0 ? even / 2 : even;
    default:
      return even;
  }
}

/// Makes the call and returns a hash of all that this rank got.
std::uint64_t perform(Communicator& group, const Case& one, std::uint32_t seed) {
  const int ranks = group.size();
  const int rank = group.rank();
  const bool at_root = rank == one.root;
  std::vector<std::size_t> in, out;
  for (int other = 0; other < ranks; ++other) {
    const std::size_t given = pieceCount(one, ranks, rank, other), got = pieceCount(one, ranks, other, rank);
    const bool first = other == 0;
    switch (one.kind) {
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kReduce:
        if (first) in.push_back(one.count);
        if (first && (at_root || one.kind == CollectiveKind::kAllReduce)) out.push_back(one.count);
        break;
      case CollectiveKind::kReduceScatter:
        in.push_back(given);
        if (first) out.push_back(pieceCount(one, ranks, 0, rank));
        break;
      case CollectiveKind::kAllGather:
      case CollectiveKind::kGather:
        if (first) in.push_back(given);
        if (at_root || one.kind == CollectiveKind::kAllGather) out.push_back(got);
        break;
      case CollectiveKind::kBroadcast:
        if (first) out.push_back(one.count);
        break;
      case CollectiveKind::kScatter:
        if (at_root) in.push_back(given);
        if (first) out.push_back(got);
        break;
      case CollectiveKind::kAllToAll:
        in.push_back(given);
        out.push_back(got);
        break;
      case CollectiveKind::kBarrier:
        break;
    }
  }
  Random random(seed * 64 + static_cast<std::uint32_t>(rank));
  const std::size_t element = elementBytes(one.dtype);
  std::vector<std::vector<unsigned char>> inputs, outputs;
  std::vector<Buffer> input_buffers, output_buffers;
  for (const std::size_t count : in) fill(inputs.emplace_back(count * element), one.dtype, random);
  for (const std::size_t count : out) outputs.emplace_back(count * element, 0xee);
  if (one.kind == CollectiveKind::kBroadcast) fill(outputs[0], one.dtype, random);
  for (auto& piece : inputs) input_buffers.push_back(bufferOf(piece));
  for (auto& piece : outputs) output_buffers.push_back(bufferOf(piece));
  const bool at_once = seed % 2 == 0;
  start(group, one.kind, input_buffers, output_buffers, one.root, one.dtype, one.op, at_once)->wait();
  return hashOf(outputs);
}

std::vector<Ended> hashesOver(Path path, int ranks) {
  return runJob(ranks, [path, ranks](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, ranks));
    auto group = world(*runtime, ranks);
    std::uint32_t seed = 0;
    for (const Case& one : casesFor(ranks)) member.report(std::to_string(perform(*group, one, ++seed)));
    member.meet();
    runtime->shutdown();
  });
}

bool sameEverywhere(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kAllGather || kind == CollectiveKind::kBroadcast;
}

void equalBits(int ranks) {
  const auto cases = casesFor(ranks);
  const auto expected = hashesOver(Path::kTcp, ranks);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (std::size_t rank = 1; rank < expected.size() && sameEverywhere(cases[i].kind); ++rank) {
      if (expected[rank].reports.at(i) == expected[0].reports.at(i)) continue;
      fail(__FILE__, __LINE__, cases[i].text() + " gives ranks 0 and " + std::to_string(rank) + " different bits");
    }
  }
  for (const Path path : {Path::kShm, Path::kShmWithoutCrossMemory}) {
    const auto found = hashesOver(path, ranks);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        if (found[rank].reports.at(i) == expected[rank].reports.at(i)) continue;
        fail(__FILE__, __LINE__,
             cases[i].text() + " gives rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                 " other bits over " + check::nameOf(path) + " than over tcp");
      }
    }
  }
  std::printf("     %zu calls of %d ranks gave equal bits over %zu transports\n", cases.size(), ranks,
              sizeof kPaths / sizeof kPaths[0]);
}
TEST(every_transport_gives_two_ranks_the_same_bits) { equalBits(2); }
TEST(every_transport_gives_three_ranks_the_same_bits) { equalBits(3); }
TEST(every_transport_gives_five_ranks_the_same_bits) { equalBits(5); }
TEST(every_transport_gives_eight_ranks_the_same_bits) { equalBits(8); }

// Alone, a rank gets what it gives.
TEST(group_of_one_gives_back_its_input) {
  runJob(1, [](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(Path::kShm, 1));
    auto group = world(*runtime, 1);
    const std::vector<std::int32_t> given = {3, 1, 4, 1, 5};
    for (const CollectiveKind kind : kKinds) {
      std::vector<std::int32_t> in = given, out(given.size(), -1);
      if (kind == CollectiveKind::kBarrier) {
        start(*group, kind, {}, {})->wait();
        continue;
      }
      const bool in_place = kind == CollectiveKind::kBroadcast;
      start(*group, kind, in_place ? std::vector<Buffer>{} : std::vector<Buffer>{bufferOf(in)},
            {bufferOf(in_place ? in : out)}, 0, DataType::kInt32)
          ->wait();
      if ((in_place ? in : out) != given) fail(__FILE__, __LINE__, std::string("wrong: ") + trainmover::nameOf(kind));
    }
    runtime->shutdown();
  });
}

}  // namespace
}  // namespace trainmover
