// Where each global rank is reached: filled from a store at the start, or by the launcher and agent. Any thread.
#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "runtime/runtime.h"

namespace trainmover {

class Directory {
 public:
  void add(const std::map<int, Endpoint>& endpoints) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, endpoint] : endpoints) endpoints_[rank] = endpoint;
  }
  std::optional<Endpoint> find(int global_rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = endpoints_.find(global_rank);
    return found == endpoints_.end() ? std::nullopt : std::optional<Endpoint>(found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, Endpoint> endpoints_;
};

}  // namespace trainmover
