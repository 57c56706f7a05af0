// The runtime: ties engine, control plane, progress thread and communicators together, and decides what a loss, a
// farewell, an abort or a switch means. Made by Runtime::create(); its part in a switch is in runtime_switch.cc.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/communicator_impl.h"
#include "runtime/control_plane.h"
#include "runtime/engine.h"
#include "runtime/notes.h"
#include "runtime/progress_thread.h"
#include "runtime/runtime.h"
#include "runtime/switch_plan.h"

namespace trainmover {

class RuntimeImpl final : public Runtime, private CommunicatorHost, private ControlListener {
 public:
  RuntimeImpl(int global_rank, const JobIdentity& identity, Settings settings, Mode mode);
  ~RuntimeImpl() override { shutdown(); }

  int globalRank() const override { return global_rank_; }
  Mode mode() const override { return mode_.load(); }
  void setMode(Mode mode) override;
  const Settings& settings() const override { return settings_; }
  Endpoint endpoint() const override { return control_.endpoint(); }

  void addEndpoints(const std::map<int, Endpoint>& endpoints, Generation generation) override;
  bool knows(int global_rank) const override { return control_.knows(global_rank); }

  std::shared_ptr<Communicator> createCommunicator(const std::string& name, std::vector<int> global_ranks,
                                                   std::chrono::milliseconds timeout) override;

  Generation generation() const override { return engine_.generation(); }
  void abortCollectives(int culprit, const std::string& why) override {
    abortWith({generation(), culprit, why, false, false});
  }
  void resume(Generation generation, const std::map<int, Endpoint>& endpoints) override;
  bool aborted() const override { return engine_.isAborted(); }

  void prepareSwitch(Generation generation, const std::map<int, Endpoint>& moved) override;
  SwitchState switchState(Generation generation) override;
  std::vector<LinkTally> commitSwitch(Generation generation) override;
  void abortSwitch(Generation generation) override;
  std::vector<int> holdLinks(Generation generation) override;
  Handover handover() const override;
  void leaveSwitch(Generation generation) override;
  void joinSwitch(Generation generation) override;
  void goLive(Generation generation, const Handover& handover) override;
  std::vector<int> linkedRanks() const override;
  void sendNote(int peer, Generation generation, std::string payload) override;
  std::optional<Note> receiveNote(std::chrono::milliseconds timeout) override { return notes_.take(timeout); }

  ControlStats controlStats() const override { return control_.stats(); }
  MemoryStats memoryStats() const override;
  std::vector<CommunicatorStats> communicatorStats() const override;
  FlightRecorder& flightRecorder() override { return recorder_; }
  void noteIteration(std::uint64_t iteration) override { iteration_.store(iteration, std::memory_order_relaxed); }
  void onAbort(std::function<void()> callback) override {
    std::lock_guard<std::mutex> lock(mutex_);
    on_abort_ = std::move(callback);
  }
  void shutdown() override;

 private:
  /// What this process is to the job. Joining: built alone, connected to, not live. Gone: another holds its rank.
  enum class Role { kMember, kJoining, kGone };

  // CommunicatorHost
  Engine& engine() override { return engine_; }
  LinkSource& links() override { return control_; }
  FlightRecorder& recorder() override { return recorder_; }
  OperationTrace* trace() override { return trace_.get(); }
  std::uint64_t iteration() const override { return iteration_.load(std::memory_order_relaxed); }
  bool isolated() const override { return mode_.load(std::memory_order_relaxed) == Mode::kIsolated; }
  Generation currentGeneration() const override { return generation(); }
  Generation pairGeneration(int global_rank) const override {
    return control_.pairGeneration(global_rank, generation());
  }
  bool prepares(Generation generation, int global_rank) const override {
    return plan_ && plan_->generation() == generation && plan_->moves(global_rank);
  }
  void linkPrepared(std::uint64_t communicator, int global_rank) override {
    if (plan_) plan_->linkUp({communicator, global_rank});
  }
  void checkUsable() const override;
  void closed(std::uint64_t communicator, std::uint64_t serial) override;
  void failed(int culprit, const std::string& why, bool lost) override {
    abortWith({generation(), culprit, why, lost, false});
  }

  // ControlListener
  Generation presentGeneration() const override { return generation(); }
  void peerLost(Generation generation, int global_rank, const std::string& why, bool silent) override {
    if (!joinBroke(why)) abortWith({generation, global_rank, why, true, silent});
  }
  void peerLeft(int global_rank) override;
  void abortHeard(std::uint32_t generation, const AbortCause& heard) override;
  void refused(int global_rank, const std::string& why) override {
    const std::string text = "the connection to global rank " + std::to_string(global_rank) + " cannot be made: " + why;
    if (!joinBroke(text)) abortWith({generation(), -1, text, false, false});
  }
  void channelPrepared(Generation generation, int global_rank) override;
  void preparedBroke(Generation generation, const std::string& why) override;
  bool noteCame(Note note) override { return notes_.put(std::move(note)); }
  void deliver(std::function<void()> work) override {
    engine_.post(std::move(work));
    progress_.poke();
  }

  void abortWith(const AbortCause& cause);
  void checkGeneration(const char* call, Generation generation) const;
  void checkMoves(Generation generation, const std::map<int, Endpoint>& moved) const;
  SwitchPlan& planOf(const char* call, Generation generation);
  void voidPlan(const std::string& why);
  void driveLastBytes(Generation generation);
  /// While this process joins, what becomes of others breaks its joining, and nothing else. False when it does not
  /// join.
  bool joinBroke(const std::string& why);
  std::vector<std::shared_ptr<CommunicatorImpl>> communicators() const;

  const int global_rank_;
  const Settings settings_;
  std::atomic<Mode> mode_;
  std::atomic<std::uint64_t> iteration_{0};
  const pid_t process_;
  FlightRecorder recorder_;
  const std::unique_ptr<OperationTrace> trace_;
  Engine engine_;
  ControlPlane control_;
  ProgressThread progress_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<CommunicatorImpl>> communicators_;
  std::function<void()> on_abort_;
  std::optional<std::pair<std::uint32_t, AbortCause>> heard_joining_;  // an abort, as abortHeard() was told
  std::optional<AbortCause> ahead_;  // of a generation that others have entered and this rank has not
  std::atomic<std::uint64_t> communicators_made_{0};
  std::atomic<Role> role_{Role::kMember};
  NoteBox notes_;

  // Under the engine's lock.
  std::optional<SwitchPlan> plan_;
  Generation last_switch_ = 0;  // prepared, held, left or joined here: never used again
  Generation held_ = 0;         // leaver: callers wait for the verdict
  Generation joining_ = 0;
  std::string join_broke_;
  bool shut_down_ = false;
};

}  // namespace trainmover
