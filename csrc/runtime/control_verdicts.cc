// Who may come in: the answer to an authenticated HELLO.
#include <algorithm>

#include "base/clock.h"
#include "runtime/control_limits.h"
#include "runtime/control_plane.h"
#include "transport/shm/link.h"

namespace trainmover {

// Answers an authenticated HELLO, or parks it until what it asks for is there.
void ControlPlane::judge(Session& session) {
  bool park = false;
  const Welcome welcome = verdictOn(*session.acceptor->hello(), park);
  if (park) {
    if (session.state == SessionState::kParked) return;
    const auto parked = std::count_if(sessions_.begin(), sessions_.end(),
                                      [](const auto& entry) { return entry.second->state == SessionState::kParked; });
    if (parked < kParkedMax) {
      session.state = SessionState::kParked;
      return;
    }
  }
  if (welcome.verdict == Verdict::kWelcome && !park) return admit(session);
  Welcome refusal = welcome;
  if (park) refusal = {Verdict::kBusy, "too many connections wait here"};
  // Those who have not heard that this rank moved are refused as often as they ask: no reason to warn of anything.
  if (refusal.verdict != Verdict::kDuplicate && given_up_ == 0) {
    refused_.fetch_add(1);
    log_.warn(config_.global_rank, "refused a connection of global rank " + std::to_string(session.key.peer) + ": " +
                                       nameOf(refusal.verdict) + ", " + refusal.reason);
  }
  const auto answer = session.acceptor->welcome(refusal);
  handshakeSend(session, answer.data(), answer.size(), {});
  drop(session.id);
}

bool ControlPlane::welcomedAlready(const Key& key) const {
  return std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
    const Session& session = *entry.second;
    return session.state == SessionState::kPassing && !(session.key < key) && !(key < session.key);
  });
}

Welcome ControlPlane::verdictOn(const Hello& hello, bool& park) {
  if (hello.job != config_.job) {
    return {Verdict::kWrongJob, "another job, or other constants: all ranks must run one version with equal settings"};
  }
  // First: where a process listens now, one of another rank may have listened that has moved since.
  if (hello.to_incarnation != config_.incarnation) return {Verdict::kWrongIncarnation, "that process is gone"};
  if (hello.to_rank != config_.global_rank) {
    return {Verdict::kWrongRank, "this is global rank " + std::to_string(config_.global_rank)};
  }
  if (given_up_ != 0) {
    return {Verdict::kStaleGeneration, "this rank moved in generation " + std::to_string(given_up_)};
  }
  const auto known = directory_.find(hello.from_rank);
  if (!known) return park = true, Welcome{};
  const Generation expected = directory_.pairGeneration(hello.from_rank, generation_);
  if (hello.generation < expected) {
    return {Verdict::kStaleGeneration, "between these two ranks it is generation " + std::to_string(expected)};
  }
  if (hello.generation > expected) return park = true, Welcome{};  // until this rank has heard of it too
  if (known->incarnation != hello.from_incarnation) {
    return {Verdict::kWrongIncarnation, "the caller is not the process that holds its rank here"};
  }
  const bool is_control = hello.purpose == Purpose::kControl;
  const Key key{hello.purpose, hello.communicator, is_control ? 0 : hello.generation, hello.from_rank};
  const auto own = wants_.find(key);
  const bool mine_first = own != wants_.end() && own->second.session != 0 && config_.global_rank < hello.from_rank;
  if (is_control) {
    if (controls_.count(hello.from_rank) != 0 || mine_first || welcomedAlready(key)) {
      return {Verdict::kDuplicate, "one is there"};
    }
    return {};
  }
  if (delivered_.count(key) != 0 || mine_first || welcomedAlready(key)) return {Verdict::kDuplicate, "one is there"};
  const auto user = users_.find(hello.communicator);
  park = held_ != 0 || user == users_.end() || user->second.global_ranks.empty() ||
         controlOf(hello.from_rank) == nullptr || (hello.purpose == Purpose::kSegment && !user->second.segment);
  if (park) return {};
  const auto& ranks = user->second.global_ranks;
  if (std::find(ranks.begin(), ranks.end(), hello.from_rank) == ranks.end()) {
    return {Verdict::kWrongRank, "not a member of this communicator"};
  }
  return {};
}

// Says welcome. What the connection is for is installed here only when the caller confirms that it has it too: else a
// caller that gave up meanwhile would be told for ever that there is one already.
void ControlPlane::admit(Session& session) {
  const Key key = session.key;
  const auto welcome = session.acceptor->welcome({});
  std::vector<int> passed;
  Descriptor memory;
  if (key.purpose == Purpose::kControl && session.local) passed = {doorbell_.memory().get(), doorbell_.event()};
  if (key.purpose == Purpose::kSegment) passed = {users_[key.communicator].segment.get()};
  if (key.purpose == Purpose::kLink && session.local) {
    session.segment = Mapping::create("trainmover-link", shm::segmentBytes(), memory);
    passed = {memory.get()};
  }
  if (!handshakeSend(session, welcome.data(), welcome.size(), passed)) return drop(session.id);
  session.state = SessionState::kPassing;
}

}  // namespace trainmover
