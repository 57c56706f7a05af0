// The runtime's part in a switch, by what this process is in it: stayer, leaver, joiner. See docs/decisions/0009.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/runtime_impl.h"

namespace trainmover {
namespace {

constexpr const char* kAborted = "aborted";
constexpr std::uint64_t kHoldLimitMs = 500;  // for connections that are just being made, for last bytes, for last words

std::string call(const char* name, Generation generation) {
  return std::string(name) + " of generation " + std::to_string(generation) + ": ";
}

}  // namespace

void RuntimeImpl::setMode(Mode mode) {
  if (mode == Mode::kLive && role_.load() == Role::kJoining) {
    throw SwitchError("this process joins a running job: go_live makes it live, nothing else");
  }
  mode_.store(mode);
}

void RuntimeImpl::addEndpoints(const std::map<int, Endpoint>& endpoints, Generation generation) {
  const std::vector<int> moved = control_.directory().add(endpoints, generation);
  control_.directoryChanged();
  if (moved.empty()) return;
  deliver([this, moved] {
    if (engine_.isAborted()) return;  // resuming drops all links
    for (const auto& communicator : communicators()) {
      for (const int global_rank : moved) communicator->peerMoved(global_rank);
    }
  });
}

// Under the engine's lock.
void RuntimeImpl::checkGeneration(const char* name, Generation generation) const {
  const Generation known = std::max({this->generation(), last_switch_, control_.directory().newest()});
  if (generation > known) return;
  throw SwitchError(call(name, generation) + "found generation " + std::to_string(known) +
                    " known here already, expected a later one; generations are never used twice");
}

// --- stayer ---------------------------------------------------------------------------------------------------------

void RuntimeImpl::checkMoves(Generation generation, const std::map<int, Endpoint>& moved) const {
  const auto refuse = [&](const std::string& why) { throw SwitchError(call("prepare_switch", generation) + why); };
  if (role_.load() != Role::kMember || isolated()) refuse("this process is no live member of the job");
  if (engine_.isAborted()) refuse("collectives are aborted; resume first");
  if (plan_) refuse("generation " + std::to_string(plan_->generation()) + " is prepared; commit or abort that first");
  if (held_ != 0) refuse("this process holds its links, to leave in generation " + std::to_string(held_));
  checkGeneration("prepare_switch", generation);
  if (moved.empty()) refuse("found no rank that moves, expected at least one");
  const std::string& machine_id = control_.endpoint().machine_id;
  for (const auto& [global_rank, endpoint] : moved) {
    const std::string rank = "global rank " + std::to_string(global_rank);
    const auto known = control_.directory().find(global_rank);
    if (global_rank == global_rank_) refuse(rank + " is this process, which cannot stay and move");
    if (!known) refuse(rank + " is not known here; add_endpoints comes first");
    if (known->incarnation == endpoint.incarnation) refuse(rank + " would move to the process that holds it already");
    for (const auto& communicator : communicators()) {
      if (communicator->sharesSegmentWith(global_rank)) {
        refuse("group " + communicator->name() + " shares memory with " + rank +
               ": ranks of one machine move together, or not at all");
      }
      const bool comes_here = !machine_id.empty() && endpoint.machine_id == machine_id;
      if (comes_here && communicator->wouldBeLocal(moved, machine_id)) {
        refuse("group " + communicator->name() + " spans machines and would not do so any more if " + rank +
               " came to this one; choose another machine");
      }
    }
  }
}

void RuntimeImpl::prepareSwitch(Generation generation, const std::map<int, Endpoint>& moved) {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  checkMoves(generation, moved);
  std::set<SwitchPlan::LinkId> links;
  for (const auto& communicator : communicators()) {
    for (const auto& [global_rank, endpoint] : moved) {
      if (communicator->hasLinkTo(global_rank)) links.insert({communicator->id(), global_rank});
    }
  }
  last_switch_ = generation;
  plan_.emplace(generation, moved, links);
  if (!links.empty()) control_.prepare(generation, moved, std::move(links));
}

SwitchPlan& RuntimeImpl::planOf(const char* name, Generation generation) {
  if (plan_ && plan_->generation() == generation) return *plan_;
  throw SwitchError(call(name, generation) + "found " +
                    (plan_ ? "generation " + std::to_string(plan_->generation()) : std::string("none")) +
                    " prepared here, expected this one; prepare_switch comes first");
}

SwitchState RuntimeImpl::switchState(Generation generation) {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  engine_.runPosted();
  if (role_.load() == Role::kJoining && joining_ == generation) {
    return {join_broke_.empty() ? SwitchPhase::kReady : SwitchPhase::kBroken, join_broke_};
  }
  SwitchPlan& plan = planOf("switch_state", generation);
  if (plan.state().phase != SwitchPhase::kBroken) {
    for (const auto& communicator : communicators()) {
      const int broken = communicator->brokenPrepared();
      if (broken < 0) continue;
      plan.broke("the prepared link of group " + communicator->name() + " to global rank " + std::to_string(broken) +
                 " was closed");
    }
  }
  return plan.state();
}

std::vector<LinkTally> RuntimeImpl::commitSwitch(Generation generation) {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  engine_.runPosted();
  const SwitchPlan& plan = planOf("commit_switch", generation);
  if (engine_.isAborted()) {
    throw SwitchError(call("commit_switch", generation) + "collectives were aborted, which voids it; resume");
  }
  const auto all = communicators();
  for (const auto& communicator : all) {
    const std::string busy = communicator->busyWith(plan.moved());
    if (busy.empty()) continue;
    throw SwitchError(call("commit_switch", generation) + busy +
                      " is outstanding on a link to a rank that moves; wait for it first");
  }
  std::set<SwitchPlan::LinkId> unused;
  for (const auto& communicator : all) {
    for (const int global_rank : communicator->dropBrokenPrepared()) unused.insert({communicator->id(), global_rank});
  }
  control_.directory().add(plan.moved(), generation);
  std::vector<LinkTally> tallies;
  for (const auto& communicator : all) tallies.push_back(communicator->commit(plan.moved(), generation));
  control_.commit(generation, plan.moved(), std::move(unused));
  plan_.reset();
  return tallies;
}

void RuntimeImpl::channelPrepared(Generation generation, int global_rank) {
  deliver([this, generation, global_rank] {
    if (plan_ && plan_->generation() == generation) plan_->channelUp(global_rank);
  });
}

void RuntimeImpl::preparedBroke(Generation generation, const std::string& why) {
  deliver([this, generation, why] {
    if (plan_ && plan_->generation() == generation) plan_->broke(why);
  });
}

// Under the engine's lock. The plan stays, broken, so that whoever asks hears why.
void RuntimeImpl::voidPlan(const std::string& why) {
  if (!plan_) return;
  plan_->broke(why);
  for (const auto& communicator : communicators()) communicator->dropPrepared();
  control_.abandon(plan_->generation());
}

void RuntimeImpl::abortSwitch(Generation generation) {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  if (plan_ && plan_->generation() == generation) {
    voidPlan(kAborted);
    plan_.reset();
  } else if (held_ == generation && held_ != 0) {
    held_ = 0;
    control_.hold(0, 0);
  } else if (role_.load() == Role::kJoining && joining_ == generation) {
    for (const auto& communicator : communicators()) communicator->forgetLinks();
    control_.forgetAll(0);
    join_broke_ = kAborted;
  }
}

// --- leaver ---------------------------------------------------------------------------------------------------------

std::vector<int> RuntimeImpl::holdLinks(Generation generation) {
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    if (role_.load() != Role::kMember || isolated() || engine_.isAborted() || plan_ || held_ != 0) {
      throw SwitchError(call("hold_links", generation) +
                        "found this process aborted, no live member, or in another switch, expected none of these");
    }
    checkGeneration("hold_links", generation);
    held_ = last_switch_ = generation;
  }
  try {
    std::set<int> linked = control_.hold(generation, kHoldLimitMs);
    driveLastBytes(generation);
    std::lock_guard<std::mutex> lock(engine_.mutex());
    for (const auto& communicator : communicators()) communicator->addLinked(linked);
    return {linked.begin(), linked.end()};
  } catch (...) {
    abortSwitch(generation);
    throw;
  }
}

// What ended here may still have words to say: a receipt that the sender waits for.
void RuntimeImpl::driveLastBytes(Generation generation) {
  const std::uint64_t deadline_ms = monotonicMs() + kHoldLimitMs;
  for (bool unsent = true; unsent;) {
    {
      std::lock_guard<std::mutex> lock(engine_.mutex());
      engine_.runPosted();
      unsent = false;
      for (const auto& communicator : communicators()) {
        communicator->advance();
        const std::string busy = communicator->busy();
        if (!busy.empty()) {
          throw SwitchError(call("hold_links", generation) + busy + " is outstanding; wait for it first");
        }
        unsent |= communicator->hasUnsent();
      }
    }
    engine_.settle();
    if (!unsent) return;
    if (monotonicMs() > deadline_ms) {
      throw SwitchError(call("hold_links", generation) + "a peer does not take what was sent to it");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Handover RuntimeImpl::handover() const {
  auto& engine = const_cast<Engine&>(engine_);
  Handover handover;
  handover.recovery = generation();
  const auto all = communicators();
  std::lock_guard<std::mutex> lock(engine.mutex());
  for (const auto& communicator : all) {
    if (!communicator->isClosed()) handover.places[communicator->name()] = communicator->place();
  }
  return handover;
}

void RuntimeImpl::leaveSwitch(Generation generation) {
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    if (held_ != generation || generation == 0) {
      throw SwitchError(call("leave_switch", generation) + "its links are not held; hold_links comes first");
    }
    role_.store(Role::kGone);
    held_ = 0;
    const AbortCause cause{this->generation(), -1, "this process has given its rank up", false, false};
    for (const auto& communicator : communicators()) communicator->fail(cause);
  }
  engine_.settle();
  control_.giveUp(generation, kHoldLimitMs);
}

// --- joiner ---------------------------------------------------------------------------------------------------------

bool RuntimeImpl::joinBroke(const std::string& why) {
  if (role_.load() != Role::kJoining) return false;
  deliver([this, why] {
    if (join_broke_.empty()) join_broke_ = why;
  });
  return true;
}

void RuntimeImpl::joinSwitch(Generation generation) {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  if (!isolated()) {
    throw SwitchError(call("join_switch", generation) + "this process is live; only one that is built alone may join");
  }
  // Others that move in the same switch may be known here already.
  const Generation known = control_.directory().newest();
  if (generation < known || generation <= std::max(last_switch_, this->generation())) {
    throw SwitchError(call("join_switch", generation) + "found generation " +
                      std::to_string(std::max({known, last_switch_, this->generation()})) +
                      " known here already, expected a later one; generations are never used twice");
  }
  joining_ = last_switch_ = generation;
  join_broke_.clear();
  {
    std::lock_guard<std::mutex> own(mutex_);
    heard_joining_.reset();
  }
  role_.store(Role::kJoining);
  for (const auto& communicator : communicators()) communicator->forgetLinks();
  control_.forgetAll(generation, [this, generation] {
    if (joining_ == generation && join_broke_ != kAborted) join_broke_.clear();
  });
}

void RuntimeImpl::goLive(Generation generation, const Handover& handover) {
  std::unique_lock<std::mutex> lock(engine_.mutex());
  engine_.runPosted();
  if (role_.load() != Role::kJoining || joining_ != generation || join_broke_ == kAborted) {
    throw SwitchError(call("go_live", generation) + "this process has not joined in it; join_switch comes first");
  }
  if (handover.recovery >= generation) {
    throw SwitchError(call("go_live", generation) + "found a handover of generation " +
                      std::to_string(handover.recovery) + ", expected an earlier one");
  }
  std::map<std::string, std::shared_ptr<CommunicatorImpl>> all;
  for (const auto& communicator : communicators()) {
    if (!communicator->isClosed()) all[communicator->name()] = communicator;
  }
  for (const auto& [name, place] : handover.places) {
    if (all.count(name) != 0) continue;
    throw SwitchError(call("go_live", generation) + "the leaver has a group " + name +
                      ", which this process has not made; it must make the same groups in the same order");
  }
  std::set<SwitchPlan::LinkId> closed;
  for (const auto& [name, communicator] : all) {
    for (const int global_rank : communicator->dropClosed()) closed.insert({communicator->id(), global_rank});
    const auto place = handover.places.find(name);
    if (place != handover.places.end()) communicator->take(place->second);
  }
  control_.undeliver(std::move(closed));
  engine_.enter(handover.recovery);
  control_.setGeneration(handover.recovery);
  role_.store(Role::kMember);
  mode_.store(Mode::kLive);
  lock.unlock();
  // What was said to all while it was none of them yet.
  std::optional<std::pair<std::uint32_t, AbortCause>> heard;
  {
    std::lock_guard<std::mutex> own(mutex_);
    heard = std::exchange(heard_joining_, std::nullopt);
  }
  if (heard) abortHeard(heard->first, heard->second);
}

// --- all ------------------------------------------------------------------------------------------------------------

std::vector<int> RuntimeImpl::linkedRanks() const {
  auto& engine = const_cast<Engine&>(engine_);
  const auto all = communicators();
  std::set<int> linked;
  std::lock_guard<std::mutex> lock(engine.mutex());
  for (const auto& communicator : all) communicator->addLinked(linked);
  return {linked.begin(), linked.end()};
}

void RuntimeImpl::sendNote(int peer, Generation generation, std::string payload) {
  if (payload.size() > kNoteBytesMax) {
    throw std::invalid_argument("found a note of " + std::to_string(payload.size()) + " bytes, expected at most " +
                                std::to_string(kNoteBytesMax));
  }
  if (peer == global_rank_ || peer < 0) {
    throw std::invalid_argument("found global rank " + std::to_string(peer) + " to send a note to, expected another");
  }
  if (role_.load() == Role::kGone) throw SwitchError("this process has given its rank up and sends no notes");
  if (!control_.knows(peer)) {
    throw TransportError("no endpoint is known for global rank " + std::to_string(peer) +
                         "; add_endpoints comes first");
  }
  control_.sendNote(peer, generation, std::move(payload));
}

}  // namespace trainmover
