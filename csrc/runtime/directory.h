// Where each global rank is reached, and the generation in which its slot last changed hands: filled from a store at
// the start, or by the launcher and agent. What two ranks share bears their pair generation. Any thread.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/runtime.h"

namespace trainmover {

class Directory {
 public:
  explicit Directory(int own_rank) : own_rank_(own_rank) {}

  /// Takes in that the slots of `endpoints` last changed hands in `generation`. Older news than what is known is left
  /// aside, and so is another process for this rank itself. Returns the ranks whose process is another now.
  std::vector<int> add(const std::map<int, Endpoint>& endpoints, Generation generation) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> moved;
    for (const auto& [rank, endpoint] : endpoints) {
      const auto found = slots_.find(rank);
      newest_ = std::max(newest_, generation);
      if (found == slots_.end()) {
        slots_[rank] = {endpoint, generation};
        continue;
      }
      Slot& slot = found->second;
      const bool another = slot.endpoint.incarnation != endpoint.incarnation;
      if (generation < slot.generation || (another && rank == own_rank_)) continue;
      if (another) moved.push_back(rank);
      slot = {endpoint, generation};
    }
    return moved;
  }

  std::optional<Endpoint> find(int global_rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = slots_.find(global_rank);
    return found == slots_.end() ? std::nullopt : std::optional<Endpoint>(found->second.endpoint);
  }

  /// What this rank and `peer` share bears at least this: the later of both slots' changes and of the last recovery.
  Generation pairGeneration(int peer, Generation recovery) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::max({generationOf(own_rank_), generationOf(peer), recovery});
  }

  /// The latest change of hands that is known here.
  Generation newest() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return newest_;
  }

 private:
  struct Slot {
    Endpoint endpoint;
    Generation generation = 1;
  };
  Generation generationOf(int global_rank) const {
    const auto found = slots_.find(global_rank);
    return found == slots_.end() ? 1 : found->second.generation;
  }

  const int own_rank_;
  mutable std::mutex mutex_;
  std::map<int, Slot> slots_;
  Generation newest_ = 1;
};

}  // namespace trainmover
