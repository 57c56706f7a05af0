// A switch as the control plane sees it: what a stayer prepares beside its live connections, and how a rank that
// changed hands is told apart from one that died.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <chrono>
#include <future>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/control_limits.h"
#include "runtime/control_plane.h"
#include "runtime/sockets.h"

namespace trainmover {

bool ControlPlane::isPlanned(const Key& key) const {
  return plan_.generation != 0 && key.generation == plan_.generation && plan_.endpoints.count(key.peer) != 0;
}

void ControlPlane::prepare(Generation generation, std::map<int, Endpoint> moved, std::set<SwitchPlan::LinkId> links) {
  command([this, generation, moved = std::move(moved), links = std::move(links)]() mutable {
    clearPlan();
    plan_.generation = generation;
    plan_.endpoints = std::move(moved);
    for (const auto& [communicator, peer] : links) {
      Want& entry = wants_[{Purpose::kLink, communicator, generation, peer}];
      entry.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
      entry.recovery = generation_;
    }
  });
}

void ControlPlane::breakPlan(const std::string& why) {
  if (plan_.generation == 0) return;
  dropPlannedWants();
  listener_.preparedBroke(plan_.generation, why);
}

// What is under way is given up, what is there stays.
void ControlPlane::dropPlannedWants() {
  std::vector<std::uint64_t> under_way;
  for (auto at = wants_.begin(); at != wants_.end();) {
    if (isPlanned(at->first)) {
      if (at->second.session != 0) under_way.push_back(at->second.session);
      at = wants_.erase(at);
    } else {
      ++at;
    }
  }
  for (const std::uint64_t id : under_way) drop(id);
}

void ControlPlane::clearPlan() {
  if (plan_.generation == 0) return;
  dropPlannedWants();
  std::vector<std::uint64_t> ids;
  for (const auto& [id, session] : sessions_) {
    if (session->authenticated && isPlanned(session->key)) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) drop(id);
  for (auto at = delivered_.begin(); at != delivered_.end();) at = isPlanned(*at) ? delivered_.erase(at) : ++at;
  plan_ = Prepared{};
}

void ControlPlane::abandon(Generation generation) {
  command([this, generation] {
    if (plan_.generation == generation) clearPlan();
  });
}

// There may be nothing prepared: then the ranks that moved are only turned to.
void ControlPlane::commit(Generation generation, std::map<int, Endpoint> moved, std::set<SwitchPlan::LinkId> unused) {
  command([this, generation, moved = std::move(moved), unused = std::move(unused)] {
    if (plan_.generation != generation) clearPlan();
    dropPlannedWants();
    for (const auto& [communicator, peer] : unused) {
      delivered_.erase({Purpose::kLink, communicator, generation, peer});
    }
    for (const auto& [peer, endpoint] : moved) turnTo(peer);
    for (const auto& [peer, id] : plan_.controls) {
      controls_[peer] = id;
      sessions_.at(id)->key.generation = 0;
    }
    {
      std::lock_guard<std::mutex> lock(doorbells_mutex_);
      for (auto& [peer, doorbell] : plan_.doorbells) doorbells_[peer] = std::move(doorbell);
    }
    const Prepared done = std::move(plan_);
    plan_ = Prepared{};
    for (const auto& [peer, id] : done.controls) {
      if (last_abort_ && last_abort_->generation == generation_) sendAbort(*sessions_.at(id), *last_abort_);
      pumpNotes(peer);
      if (sessions_.count(id) != 0) takeControlFrames(*sessions_.at(id));
    }
    listener_.deliver([] {});
  });
}

void ControlPlane::undeliver(std::set<SwitchPlan::LinkId> links) {
  command([this, links = std::move(links)] {
    for (const auto& [communicator, peer] : links) {
      delivered_.erase({Purpose::kLink, communicator, directory_.pairGeneration(peer, generation_), peer});
    }
  });
}

// `peer` is another process now. The old one is told, so that it takes the end of this connection for what it is;
// whoever here waits for a connection to the old one waits for one to the new.
void ControlPlane::turnTo(int peer) {
  const auto endpoint = directory_.find(peer);
  if (!endpoint) return;
  const Generation generation = directory_.pairGeneration(peer, generation_);
  std::vector<std::uint64_t> old;
  for (const auto& [id, session] : sessions_) {
    const bool of_it = session->authenticated && session->key.peer == peer && !isPlanned(session->key);
    const bool parked = session->state == SessionState::kParked;  // it may be the new one that called before we heard
    if (of_it && !parked && isReplaced(*session)) old.push_back(id);
  }
  for (const std::uint64_t id : old) {
    Session& session = *sessions_.at(id);
    if (session.state == SessionState::kControl) {
      takeLeave(session, generation);
      std::lock_guard<std::mutex> lock(doorbells_mutex_);
      doorbells_.erase(peer);
    } else {
      drop(id);
    }
  }
  dropNotes(peer, endpoint->incarnation);
  for (auto* gone : {&left_, &moved_}) {
    const auto found = gone->find(peer);
    if (found != gone->end() && found->second != endpoint->incarnation) gone->erase(found);
  }
  for (auto at = delivered_.begin(); at != delivered_.end();) {
    at = at->peer == peer && at->generation < generation ? delivered_.erase(at) : ++at;
  }
  std::vector<std::pair<Key, Want>> turned;
  for (auto at = wants_.begin(); at != wants_.end();) {
    const bool outdated = at->first.purpose != Purpose::kControl && at->first.generation < generation;
    if (at->first.peer != peer || isPlanned(at->first) || !outdated) {
      ++at;
      continue;
    }
    turned.emplace_back(*at);
    at = wants_.erase(at);
  }
  for (auto& [key, want] : turned) {
    if (want.session != 0) drop(want.session);
    want.session = want.next_ms = 0;
    want.refused = 0;
    want.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
    Key now = key;
    now.generation = generation;
    wants_.emplace(now, want);
  }
  const auto control = wants_.find({Purpose::kControl, 0, 0, peer});
  if (control != wants_.end() && control->second.session == 0) control->second.next_ms = 0;
}

// The last word on a control channel: one of the two ranks has changed hands. It closes when that has gone out.
void ControlPlane::takeLeave(Session& session, Generation generation) {
  const int peer = session.key.peer;
  const auto control = controls_.find(peer);
  if (control != controls_.end() && control->second == session.id) controls_.erase(control);
  sendFrame(session, FrameKind::kMoved, 0, generation, "");
  session.key = Key{};
  session.state = SessionState::kLeaving;
  session.deadline_ms = monotonicMs() + kHandshakeLimitMs;
  if (session.outgoing.empty()) ::shutdown(session.socket.get(), SHUT_WR);
}

void ControlPlane::serveLeaving(Session& session) {
  if (!session.outgoing.empty() && flush(session)) {
    ::shutdown(session.socket.get(), SHUT_WR);
    watch(session, false);
  }
  std::uint8_t bytes[4096];
  std::vector<Descriptor> none;
  // Read out, not closed over: a kernel that finds unread bytes resets the connection, and the last word may be lost.
  if (receiveWith(session.socket.get(), bytes, sizeof bytes, none, 0) < 0) drop(session.id);
}

std::set<int> ControlPlane::hold(Generation generation, std::uint64_t limit_ms) {
  const std::uint64_t deadline_ms = monotonicMs() + limit_ms;
  for (;;) {
    auto told = std::make_shared<std::promise<std::set<int>>>();
    command([this, generation, told] {
      held_ = generation;
      std::set<int> passing;
      for (const auto& [id, session] : sessions_) {
        const bool link = session->key.purpose != Purpose::kControl;
        if (link && session->state == SessionState::kPassing) passing.insert(session->key.peer);
      }
      told->set_value(std::move(passing));
    });
    auto answer = told->get_future();
    if (generation == 0) return {};
    if (answer.wait_for(std::chrono::milliseconds(limit_ms)) != std::future_status::ready) {
      throw TransportError("the control plane did not answer within " + std::to_string(limit_ms) + " ms");
    }
    std::set<int> passing = answer.get();
    if (passing.empty() || monotonicMs() >= deadline_ms) return passing;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void ControlPlane::giveUp(Generation generation, std::uint64_t limit_ms) {
  auto done = std::make_shared<std::promise<void>>();
  command([this, generation, done] {
    given_up_ = generation;
    held_ = 0;
    clearPlan();
    wants_.clear();
    delivered_.clear();
    std::vector<std::uint64_t> others;
    for (const auto& [id, session] : sessions_) {
      if (!session->authenticated || session->state == SessionState::kLeaving) continue;
      if (mayTakeFrames(*session)) {
        if (session->state == SessionState::kControl) pumpNotes(session->key.peer, SIZE_MAX);
        takeLeave(*session, generation);
      } else if (session->state != SessionState::kParked) {
        others.push_back(id);  // those who are parked are answered
      }
    }
    for (const std::uint64_t id : others) drop(id);
    done->set_value();
    std::lock_guard<std::mutex> lock(doorbells_mutex_);
    doorbells_.clear();
  });
  done->get_future().wait_for(std::chrono::milliseconds(limit_ms));
}

void ControlPlane::forgetAll(Generation generation, std::function<void()> then) {
  command([this, generation, then = std::move(then)]() mutable {
    clearPlan();
    wants_.clear();
    delivered_.clear();
    left_.clear();
    moved_.clear();
    last_abort_.reset();
    held_ = given_up_ = 0;
    std::vector<std::uint64_t> ids;
    for (const auto& [id, session] : sessions_) {
      if (session->authenticated && session->state != SessionState::kLeaving) ids.push_back(id);
    }
    for (const std::uint64_t id : ids) drop(id);
    for (auto& [communicator, user] : users_) user.segment.reset();
    if (generation != 0) directory_.add({{config_.global_rank, endpoint_}}, generation);
    if (then) listener_.deliver(std::move(then));
    std::lock_guard<std::mutex> lock(doorbells_mutex_);
    doorbells_.clear();
  });
}

ControlStats ControlPlane::stats() const {
  ControlStats stats;
  stats.messages_sent = sent_.load(std::memory_order_relaxed);
  stats.messages_received = received_.load(std::memory_order_relaxed);
  stats.connections_made = made_.load(std::memory_order_relaxed);
  stats.connections_accepted = accepted_.load(std::memory_order_relaxed);
  stats.refused = refused_.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace trainmover
