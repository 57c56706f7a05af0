// What a collective is, as data: a list of steps over the links of a communicator. Builders (one file per operation)
// are pure functions of a Shape; runtime/scheduled_operation.cc executes what they return, on any transport.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace trainmover {

enum class CollectiveKind : std::uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
};

/// One collective as every rank sees it. Pieces are in elements of `dtype` for reductions, in bytes (kUInt8) otherwise.
///
/// kind           input pieces       output pieces     who knows the counts
/// kAllReduce     1 (= output)       1                 all
/// kReduce        1                  1 at root, else 0 all (output may be the same memory as input)
/// kReduceScatter size, uneven ok    1                 all: `pieces[i]` is what group rank i gets
/// kAllGather     1                  size, uneven ok   all: `pieces[i]` is what group rank i gives
/// kBroadcast     1 (= output)       1                 all; `pieces[0]`
/// kGather        1                  size at root      all equal; `pieces[0]`
/// kScatter       size at root       1                 all equal; `pieces[0]`
/// kAllToAll      size, uneven ok    size, uneven ok   own only: `pieces[i]` to i, `received[i]` from i
/// kBarrier       0                  0
///
/// kAllReduce and kBroadcast work in place: input piece 0 and output piece 0 are the same memory. Elsewhere a rank's
/// own part may be: kReduceScatter's output may be the memory of input piece `rank`, kAllGather's and kGather's input
/// that of output piece `rank`, kScatter's output that of input piece `rank`, kReduce's output that of its input.
struct Shape {
  CollectiveKind kind = CollectiveKind::kBarrier;
  int size = 1;
  int rank = 0;  // group rank for which the schedule is built
  int root = 0;
  DataType dtype = DataType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  std::vector<std::size_t> pieces;    // counts, see above; kAllReduce and kReduce: one entry
  std::vector<std::size_t> received;  // kAllToAll only
};

enum class Space : std::uint8_t { kInput, kOutput, kScratch };

/// `bytes` bytes from `offset` of piece `piece` of a space. Scratch is one piece, which begins at a multiple of 64;
/// what lies in it lies at multiples of its own element's size.
struct Region {
  Space space = Space::kScratch;
  int piece = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

enum class StepKind : std::uint8_t {
  kSend,     // source -> peer
  kReceive,  // peer -> target
  kCopy,     // source -> target, bytes as they are; nothing to do at the same address, or for 0 bytes (a mere join)
  kReduce,   // target = source (x) target, or target (x) source when target_first; target is in accumulator form
  kWiden,    // source (elements) -> target (accumulators)
  kFinish,   // source (accumulators) -> target (elements): rounds 16-bit floats, divides for kAverage; may be in place
};

/// The earlier steps that a step waits for. Held in place, so that building a schedule allocates nothing per step; what
/// waits for more goes through a kCopy of 0 bytes that joins them.
class After {
 public:
  static constexpr std::size_t kMax = 6;

  void add(std::uint32_t step) {
    assert(count_ < kMax);
    steps_[count_++] = step;
  }
  const std::uint32_t* begin() const { return steps_.data(); }
  const std::uint32_t* end() const { return steps_.data() + count_; }
  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == kMax; }

 private:
  std::uint32_t count_ = 0;
  std::array<std::uint32_t, kMax> steps_{};
};

/// One step. It starts when all steps in `after` are complete; steps not so ordered may run at once, in any order.
/// Regions of steps that may run at once never overlap unless both only read.
struct Step {
  StepKind kind = StepKind::kCopy;
  Form source_form = Form::kElement;  // kReduce: form of source
  bool target_first = false;          // kReduce: operand order, which decides what comes of NaNs; lower rank first
  int peer = -1;                      // kSend, kReceive: group rank
  std::uint32_t tag = 0;              // kSend, kReceive: unique per (from, to) in one schedule; same at both ends
  std::size_t count = 0;              // kReduce, kWiden, kFinish: elements
  Region source;
  Region target;
  After after;  // indices of earlier steps
};

struct Schedule {
  std::vector<Step> steps;  // topologically ordered: `after` only names earlier ones
  std::size_t scratch_bytes = 0;
};

/// Most scratch of an operation that reduces, in groups of up to 1024 ranks, whatever the size of the vector: its parts
/// take turns. So is that of broadcasts (none), gathers and scatters. All-gathers: see all_gather.cc; kAllToAll stores
/// what it forwards: see all_to_all.h.
constexpr std::size_t kScratchBytesMax = std::size_t{16} << 20;

/// Largest part of a message that is sent, received and reduced as one, so that the three overlap.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

/// Tags are smaller than this, so that a key has room for other things.
constexpr std::uint32_t kTagsMax = std::uint32_t{1} << 24;

/// The schedule of `shape` for `shape.rank`. kAllToAll of uneven pieces over more ranks than are linked directly needs
/// two: see all_to_all.h. Throws std::invalid_argument for a shape that contradicts itself.
Schedule buildSchedule(const Shape& shape);

}  // namespace trainmover
