// Runs the schedules of all ranks of a group together, over memory of its own and in an order drawn from a seed, and
// checks what schedule.h promises about them. A message passes only once both ends have started it, as large ones do on
// a link. Used by schedule_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "collectives/schedule.h"
#include "collectives/topology.h"
#include "schedule_arithmetic.h"

namespace trainmover::simulation {

/// Memory of a caller's; pieces of two ranks or spaces may be the same memory.
struct Piece {
  unsigned char* data = nullptr;
  std::size_t bytes = 0;
};

struct Rank {
  Shape shape;
  Schedule schedule;
  std::vector<Piece> inputs;
  std::vector<Piece> outputs;
  Bytes scratch;

  unsigned char* at(const Region& region) {
    if (region.space == Space::kScratch) return scratch.data() + region.offset;
    const auto& pieces = region.space == Space::kInput ? inputs : outputs;
    return pieces[static_cast<std::size_t>(region.piece)].data + region.offset;
  }
};

inline bool isMessage(const Step& step) { return step.kind == StepKind::kSend || step.kind == StepKind::kReceive; }

/// Fails with `what` and where it was found.
inline void require(bool holds, const Shape& shape, std::size_t step, const char* what) {
  if (holds) return;
  check::fail("schedule", static_cast<int>(step),
              std::string(what) + " (kind " + std::to_string(static_cast<int>(shape.kind)) + ", size " +
                  std::to_string(shape.size) + ", rank " + std::to_string(shape.rank) + ", root " +
                  std::to_string(shape.root) + ", first piece " +
                  std::to_string(shape.pieces.empty() ? 0 : shape.pieces[0]) + ", step in place of line)");
}

/// What holds for the schedule of one rank by itself, but for memory: order, links, tags, lengths.
inline void checkSteps(const Shape& shape, const Schedule& schedule) {
  const std::vector<int> peers = peersOf(shape.size, shape.rank);
  std::vector<std::tuple<StepKind, int, std::uint32_t>> messages;
  const std::size_t element = elementBytes(shape.dtype);
  const std::size_t sum = accumulatorBytes(shape.dtype);
  for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    const auto holds = [&](bool condition, const char* what) { require(condition, shape, i, what); };
    for (std::uint32_t before : step.after) holds(before < i, "waits for a later step");
    const std::size_t from = step.source.bytes;
    const std::size_t to = step.target.bytes;
    if (isMessage(step)) {
      holds(std::binary_search(peers.begin(), peers.end(), step.peer),
            "a message to or from a rank that is not a peer");
      const std::size_t bytes = step.kind == StepKind::kSend ? from : to;
      holds((bytes == 0) == (shape.kind == CollectiveKind::kBarrier), "an empty message, or a barrier with data");
      holds(step.tag < kTagsMax, "a tag that is too large");
      messages.emplace_back(step.kind, step.peer, step.tag);
    } else if (step.kind == StepKind::kCopy) {
      holds(from == to, "a copy between different lengths");
      holds(from > 0 || step.after.size() > 1, "a copy of nothing that joins nothing");
    } else {
      holds(step.count > 0, "arithmetic on nothing");
      const bool widens = step.kind == StepKind::kWiden;
      const bool reduces = step.kind == StepKind::kReduce;
      const std::size_t source_unit = reduces ? bytesOf(shape.dtype, step.source_form) : widens ? element : sum;
      holds(from == step.count * source_unit, "a source of the wrong length");
      holds(to == step.count * (step.kind == StepKind::kFinish ? element : sum), "a target of the wrong length");
      holds(!widens || element != sum, "a widening that does nothing");
      holds(step.kind != StepKind::kFinish || element != sum || shape.op == ReduceOp::kAverage,
            "a finish that does nothing");
    }
    holds(to == 0 || step.target.space != Space::kInput, "writes to its input");
  }
  std::sort(messages.begin(), messages.end());
  require(std::adjacent_find(messages.begin(), messages.end()) == messages.end(), shape, 0, "a tag is used twice");
  const bool stores = shape.kind == CollectiveKind::kAllToAll || shape.kind == CollectiveKind::kAllGather;
  require(stores || schedule.scratch_bytes <= kScratchBytesMax, shape, 0, "more scratch than kScratchBytesMax");
}

/// Steps that come before each step, as bits.
class Ancestors {
 public:
  explicit Ancestors(const Schedule& schedule)
      : words_((schedule.steps.size() + 63) / 64), bits_(words_ * schedule.steps.size(), 0) {
    for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
      for (std::uint32_t before : schedule.steps[i].after) {
        for (std::size_t word = 0; word <= before / 64; ++word)
          bits_[i * words_ + word] |= bits_[before * words_ + word];
        bits_[i * words_ + before / 64] |= std::uint64_t{1} << (before % 64);
      }
    }
  }
  bool ordered(std::size_t a, std::size_t b) const {
    const std::size_t early = std::min(a, b);
    return bits_[std::max(a, b) * words_ + early / 64] >> (early % 64) & 1;
  }

 private:
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

/// Regions are within their pieces, and no two steps that may run at once touch the same memory unless both read.
inline void checkMemory(Rank& rank) {
  struct Use {
    std::uintptr_t begin, end;
    std::size_t step;
    bool writes;
  };
  std::vector<Use> uses;
  const auto& steps = rank.schedule.steps;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (const bool writes : {false, true}) {
      const Region& region = writes ? steps[i].target : steps[i].source;
      if (region.bytes == 0) continue;
      std::size_t space_bytes = rank.scratch.size();
      if (region.space != Space::kScratch) {
        const auto& pieces = region.space == Space::kInput ? rank.inputs : rank.outputs;
        require(static_cast<std::size_t>(region.piece) < pieces.size(), rank.shape, i, "a piece that isn't there");
        space_bytes = pieces[static_cast<std::size_t>(region.piece)].bytes;
      }
      require(region.offset <= space_bytes && region.bytes <= space_bytes - region.offset, rank.shape, i,
              "a region beyond its piece");
      if (steps[i].kind == StepKind::kCopy && rank.at(steps[i].source) == rank.at(steps[i].target)) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(rank.at(region));
      uses.push_back(Use{begin, begin + region.bytes, i, writes});
    }
  }
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.begin < b.begin; });
  const Ancestors ancestors(rank.schedule);
  for (std::size_t a = 0; a < uses.size(); ++a) {
    for (std::size_t b = a + 1; b < uses.size() && uses[b].begin < uses[a].end; ++b) {
      if (!uses[a].writes && !uses[b].writes) continue;
      if (uses[a].step == uses[b].step) {
        const bool in_place = steps[uses[a].step].kind == StepKind::kFinish && uses[a].begin == uses[b].begin;
        require(in_place, rank.shape, uses[a].step, "source and target overlap");
        continue;
      }
      require(ancestors.ordered(uses[a].step, uses[b].step), rank.shape, uses[b].step, "a race over memory");
    }
  }
}

/// Runs schedules together. A rank that is held back never starts anything.
class Simulation {
 public:
  Simulation(std::vector<Rank>& ranks, std::uint64_t seed, int held_back = -1) : ranks_(ranks), random_(seed) {
    unfinished_.resize(ranks.size());
    missing_.resize(ranks.size());
    followers_.resize(ranks.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto& steps = ranks[r].schedule.steps;
      unfinished_[r] = steps.size();
      missing_[r].resize(steps.size());
      followers_[r].resize(steps.size());
      for (std::uint32_t i = 0; i < steps.size(); ++i) {
        missing_[r][i] = steps[i].after.size();
        for (std::uint32_t before : steps[i].after) followers_[r][before].push_back(i);
      }
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (static_cast<int>(r) == held_back) continue;
      for (std::uint32_t i = 0; i < missing_[r].size(); ++i) {
        if (missing_[r][i] == 0) start(r, i);
      }
    }
  }

  /// Until nothing can go on.
  void run() {
    while (!runnable_.empty()) {
      const std::size_t chosen = random_() % runnable_.size();
      const Action action = runnable_[chosen];
      runnable_[chosen] = runnable_.back();
      runnable_.pop_back();
      perform(action);
    }
  }

  std::size_t unfinishedSteps(std::size_t rank) const { return unfinished_[rank]; }

 private:
  /// A step that can run, and for a message, where it goes.
  struct Action {
    std::size_t rank;
    std::uint32_t step;
    std::size_t to_rank = 0;
    std::uint32_t to_step = 0;
  };

  void start(std::size_t rank, std::uint32_t index) {
    const Step& step = ranks_[rank].schedule.steps[index];
    if (!isMessage(step)) return runnable_.push_back(Action{rank, index});
    const bool sends = step.kind == StepKind::kSend;
    const std::size_t peer = static_cast<std::size_t>(step.peer);
    const std::uint64_t from = sends ? rank : peer;
    const std::uint64_t to = sends ? peer : rank;
    const std::uint64_t key = (from << 16 | to) << 32 | step.tag;
    const auto other = waiting_.find(key);
    if (other == waiting_.end()) {
      waiting_[key] = index;
      return;
    }
    runnable_.push_back(sends ? Action{rank, index, peer, other->second} : Action{peer, other->second, rank, index});
    waiting_.erase(other);
  }

  void perform(const Action& action) {
    Rank& rank = ranks_[action.rank];
    const Step& step = rank.schedule.steps[action.step];
    const DataType type = rank.shape.dtype;
    switch (step.kind) {
      case StepKind::kSend: {
        Rank& peer = ranks_[action.to_rank];
        const Region& target = peer.schedule.steps[action.to_step].target;
        require(step.source.bytes == target.bytes, rank.shape, action.step, "sent and received lengths differ");
        if (target.bytes > 0) std::memcpy(peer.at(target), rank.at(step.source), target.bytes);
        end(action.to_rank, action.to_step);
        break;
      }
      case StepKind::kReceive:
        throw std::logic_error("receives run with their sends");
      case StepKind::kCopy:
        if (step.source.bytes > 0) std::memmove(rank.at(step.target), rank.at(step.source), step.source.bytes);
        break;
      case StepKind::kReduce:
        accumulate(type, rank.at(step.target), rank.at(step.source), step.source_form, step.target_first, step.count);
        break;
      case StepKind::kWiden:
        widen(type, rank.at(step.target), rank.at(step.source), step.count);
        break;
      case StepKind::kFinish:
        finish(type, rank.shape.op, rank.shape.size, rank.at(step.target), rank.at(step.source), step.count);
        break;
    }
    end(action.rank, action.step);
  }

  void end(std::size_t rank, std::uint32_t index) {
    --unfinished_[rank];
    for (std::uint32_t follower : followers_[rank][index]) {
      if (--missing_[rank][follower] == 0) start(rank, follower);
    }
  }

  std::vector<Rank>& ranks_;
  std::mt19937_64 random_;
  std::vector<std::size_t> unfinished_;
  std::vector<std::vector<std::size_t>> missing_;
  std::vector<std::vector<std::vector<std::uint32_t>>> followers_;
  std::unordered_map<std::uint64_t, std::uint32_t> waiting_;  // messages that one end has started, by ends and tag
  std::vector<Action> runnable_;
};

/// Checks all schedules, runs them, and requires that all end.
inline void runAll(std::vector<Rank>& ranks, std::uint64_t seed) {
  for (Rank& rank : ranks) {
    rank.scratch.assign(rank.schedule.scratch_bytes, 0xA5);
    checkSteps(rank.shape, rank.schedule);
    checkMemory(rank);
  }
  Simulation simulation(ranks, seed);
  simulation.run();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    require(simulation.unfinishedSteps(r) == 0, ranks[r].shape, simulation.unfinishedSteps(r),
            "steps that never end: a deadlock, or a message with one end only");
  }
}

}  // namespace trainmover::simulation
