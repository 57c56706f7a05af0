// The table of one switch on a stayer: which ranks move, what has to be connected beside the live links before it may
// be committed, and how far that is. Pure; runtime_switch.cc keeps it, under the engine's lock.
//
//   pending --all is up--> ready
//   pending, ready --something broke--> broken
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "runtime/runtime.h"

namespace trainmover {

class SwitchPlan {
 public:
  /// A link: communicator, global rank.
  using LinkId = std::pair<std::uint64_t, int>;

  SwitchPlan(Generation generation, std::map<int, Endpoint> moved, std::set<LinkId> links)
      : generation_(generation), moved_(std::move(moved)), missing_links_(std::move(links)) {
    for (const LinkId& link : missing_links_) missing_channels_.insert(link.second);
    settle();
  }

  Generation generation() const { return generation_; }
  const std::map<int, Endpoint>& moved() const { return moved_; }
  bool moves(int global_rank) const { return moved_.count(global_rank) != 0; }
  const std::set<LinkId>& missingLinks() const { return missing_links_; }
  const std::set<int>& missingChannels() const { return missing_channels_; }

  /// The control channel to the process that takes over `global_rank` is up.
  void channelUp(int global_rank) {
    missing_channels_.erase(global_rank);
    settle();
  }
  void linkUp(const LinkId& link) {
    missing_links_.erase(link);
    settle();
  }
  /// Stays so. The first reason counts.
  void broke(const std::string& why) {
    if (phase_ == SwitchPhase::kBroken) return;
    phase_ = SwitchPhase::kBroken;
    reason_ = why;
  }

  SwitchState state() const { return {phase_, reason_}; }

 private:
  void settle() {
    if (phase_ == SwitchPhase::kPending && missing_links_.empty() && missing_channels_.empty()) {
      phase_ = SwitchPhase::kReady;
    }
  }

  Generation generation_;
  std::map<int, Endpoint> moved_;
  std::set<LinkId> missing_links_;
  std::set<int> missing_channels_;
  SwitchPhase phase_ = SwitchPhase::kPending;
  std::string reason_;
};

}  // namespace trainmover
