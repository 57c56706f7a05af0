// The thread that makes and watches connections: accepts, authenticates, connects, keeps one control channel to each
// process this one works with (liveness, aborts, farewells), and hands finished links to their communicators. It never
// takes the engine's lock or the interpreter's, so heartbeats go out whatever the rest of the process does.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/descriptor.h"
#include "base/log.h"
#include "runtime/control_limits.h"
#include "runtime/directory.h"
#include "runtime/doorbell.h"
#include "runtime/engine.h"
#include "runtime/link_source.h"
#include "runtime/session.h"
#include "runtime/switch_plan.h"
#include "wire/handshake.h"

namespace trainmover {

struct ControlConfig {
  int global_rank = 0;
  std::uint64_t incarnation = 0;
  std::string token;
  Digest job{};
  Settings settings;
};

/// What the control plane tells the runtime. Called on its thread; must not block.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  virtual Generation presentGeneration() const = 0;
  /// `global_rank`, as it was in `generation`, died (`silent`: gives no sign of life).
  virtual void peerLost(Generation generation, int global_rank, const std::string& why, bool silent) = 0;
  virtual void peerLeft(int global_rank) = 0;
  /// Another rank aborted `generation` (its low 32 bits; the cause's own generation is not set).
  virtual void abortHeard(std::uint32_t generation, const AbortCause& cause) = 0;
  /// A connection can never be made (other job, other version): what waits for it fails with HandshakeRefused.
  virtual void refused(int global_rank, const std::string& why) = 0;
  /// The control channel to the process that takes over `global_rank` in `generation` is up.
  virtual void channelPrepared(Generation generation, int global_rank) = 0;
  /// What was prepared for `generation` cannot be had, or is gone again.
  virtual void preparedBroke(Generation generation, const std::string& why) = 0;
  /// False when too many wait to be taken.
  virtual bool noteCame(Note note) = 0;
  /// Runs under the engine's lock, soon.
  virtual void deliver(std::function<void()> work) = 0;
};

class ControlPlane final : public LinkSource {
 public:
  ControlPlane(ControlConfig config, Doorbell& doorbell, ControlListener& listener);
  ~ControlPlane() override { stop(); }

  Endpoint endpoint() const { return endpoint_; }
  Directory& directory() { return directory_; }
  const Directory& directory() const { return directory_; }
  void start();
  /// Says farewell to all peers and ends the thread. Idempotent.
  void stop();

  /// `serial` tells users of one id, one after the other, apart.
  void addUser(std::uint64_t communicator, std::uint64_t serial, std::vector<int> global_ranks,
               std::weak_ptr<LinkUser> user);
  void removeUser(std::uint64_t communicator, std::uint64_t serial);
  /// From now on only links of `generation` are made; older ones under way are dropped.
  void setGeneration(Generation generation);
  /// Tells all peers that a generation is aborted.
  void tellAbort(const AbortCause& cause);
  /// The endpoints of some ranks have changed.
  void directoryChanged();

  // The switch (control_switch.cc).

  /// Connects beside what is live: a control channel to each of `moved` that `links` name, then those links.
  void prepare(Generation generation, std::map<int, Endpoint> moved, std::set<SwitchPlan::LinkId> links);
  /// After the directory was told: prepared channels become live. `unused`: prepared links that were not taken.
  void commit(Generation generation, std::map<int, Endpoint> moved, std::set<SwitchPlan::LinkId> unused);
  void abandon(Generation generation);
  /// Callers for links wait from now on, or (0) are let in again. Waits for those who are just passing; the ranks of
  /// those who still are after `limit_ms`.
  std::set<int> hold(Generation generation, std::uint64_t limit_ms);
  /// This process has given its rank up: it tells all, drops all, and refuses all. Waits up to `limit_ms` until all
  /// that can be told have been, so that its end is no death from then on.
  void giveUp(Generation generation, std::uint64_t limit_ms);
  /// Forgets all connections; `generation` (0: as before) is this rank's slot's from then on. `then` is delivered after
  /// all that was said of those connections.
  void forgetAll(Generation generation, std::function<void()> then = {});
  /// Links that were dropped because their other end was gone: they may be made anew.
  void undeliver(std::set<SwitchPlan::LinkId> links);

  /// Queues a note. Any thread; never blocks. Throws TransportError when too many wait.
  void sendNote(int peer, Generation generation, std::string payload);
  ControlStats stats() const;
  Generation pairGeneration(int peer, Generation recovery) const { return directory_.pairGeneration(peer, recovery); }

  void wantControl(int global_rank) override;
  void wantLink(std::uint64_t communicator, Generation generation, int global_rank) override;
  void wantSegment(std::uint64_t communicator, Generation generation, int global_rank, std::size_t bytes) override;
  void offerSegment(std::uint64_t communicator, Generation generation, Descriptor memory) override;
  bool sharesMemory(int global_rank) const override;
  bool knows(int global_rank) const override { return directory_.find(global_rank).has_value(); }
  std::shared_ptr<PeerDoorbell> doorbellOf(int global_rank) const override;
  bool crossMemoryAllowed() const override { return config_.settings.use_cross_memory; }

 private:
  struct Want {
    std::uint64_t deadline_ms = 0, next_ms = 0;
    std::uint64_t session = 0;  // 0: none under way
    int refused = 0;            // times in a row that nobody listened
    std::uint64_t refused_since_ms = 0;
    std::size_t bytes = 0;            // of a segment
    Generation recovery = 0;          // of those who asked
    std::uint64_t unanswered_ms = 0;  // when a call ended that the peer had taken and not answered
  };
  /// Of a switch under way; generation 0: none.
  struct Prepared {
    Generation generation = 0;
    std::map<int, Endpoint> endpoints;
    std::map<int, std::uint64_t> controls;  // global rank -> session
    std::map<int, std::shared_ptr<PeerDoorbell>> doorbells;
  };
  struct User {
    std::uint64_t serial = 0;
    std::vector<int> global_ranks;
    std::weak_ptr<LinkUser> user;
    Generation segment_generation = 0;
    Descriptor segment;
  };

  void run();
  void command(std::function<void()> work);
  void runCommands();
  void dropLinksOf(std::uint64_t communicator);
  void want(const Key& key, Generation recovery, std::size_t bytes);
  void timers(std::uint64_t now_ms);
  bool isHeld(const Key& key, const Want& want, std::uint64_t now_ms);
  void pursue(const Key& key, Want& want, std::uint64_t now_ms);
  void connectFor(const Key& key, Want& want, std::uint64_t now_ms);
  void fulfilled(const Key& key);
  void endWant(const Key& key);
  void acceptAll(const Descriptor& listener, bool local);
  Session& addSession(Descriptor socket, bool local, bool initiator);
  void watch(Session& session, bool for_write);
  void drop(std::uint64_t id);
  void serve(std::uint64_t id, std::uint32_t events);
  void serveState(Session& session, std::uint32_t events);
  void serveConnecting(Session& session);
  void serveHandshake(Session& session);
  void servePassing(Session& session);
  bool mayTakeFrames(const Session& session) const;
  void serveControl(Session& session);
  void takeControlFrames(Session& session);
  bool isForLater(const Session& session, const FrameHeader& header) const;
  void takeControlFrame(Session& session, const FrameHeader& header, const std::string& reason);
  void judge(Session& session);
  Welcome verdictOn(const Hello& hello, bool& park);
  bool welcomedAlready(const Key& key) const;
  void admit(Session& session);
  void install(Session& session, const Key& key, bool creator);
  void welcomed(Session& session);
  void connectFailed(Session& session, int error);
  void controlUp(Session& session);
  void deliverLink(const Key& key, std::unique_ptr<Link> link);
  std::unique_ptr<Link> localLink(Mapping segment, const Key& key, bool creator);
  void lost(int peer, const std::string& why, bool silent);
  void lostSession(const Session& session, const std::string& why, bool silent);
  bool isReplaced(const Session& session) const;
  void forget(int peer);
  void sendAbort(Session& session, const AbortCause& cause);
  void sendFrame(Session& session, FrameKind kind, Generation generation, std::uint64_t key, const std::string& reason);
  void heartbeats(std::uint64_t now_ms);
  int tickMs() const;
  Session* controlOf(int peer);
  Session* controlFor(const Key& key);
  bool isControlTaken(const Key& key) const;
  void takeControl(Session& session);
  bool isPlanned(const Key& key) const;
  bool sharesMemoryWith(const Endpoint& endpoint) const;
  void breakPlan(const std::string& why);
  void dropPlannedWants();
  void clearPlan();
  void nobodyListens(const Key& key, Want& want, std::uint64_t now_ms);
  void turnTo(int peer);
  void takeLeave(Session& session, Generation generation);
  void serveLeaving(Session& session);
  void transmit(Session& session, const void* data, std::size_t bytes);
  bool flush(Session& session);
  void pumpNotes(int peer, std::size_t outgoing_bytes_max = kOutgoingBytesMax);
  void dropNotes(int peer, std::uint64_t but_for = 0);
  bool handshakeSend(Session& session, const void* data, std::size_t bytes, const std::vector<int>& descriptors);

  const ControlConfig config_;
  Doorbell& doorbell_;
  ControlListener& listener_;
  Directory directory_;
  Endpoint endpoint_;
  Descriptor tcp_listener_, unix_listener_, wake_, events_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> refused_{0}, sent_{0}, received_{0}, made_{0}, accepted_{0};

  std::mutex commands_mutex_;
  std::vector<std::function<void()>> commands_;

  mutable std::mutex doorbells_mutex_;
  std::map<int, std::shared_ptr<PeerDoorbell>> doorbells_;

  std::mutex notes_mutex_;
  struct Unsent {
    Note note;
    std::uint64_t incarnation;  // of the process that it is for; 0: not known then
  };
  std::map<int, std::deque<Unsent>> notes_;  // by global rank

  // The thread's own from here on.
  Generation generation_ = 1;
  std::map<std::uint64_t, User> users_;
  std::map<std::uint64_t, std::unique_ptr<Session>> sessions_;
  std::uint64_t next_session_ = 16;
  std::map<Key, Want> wants_;
  std::set<Key> delivered_;
  std::map<int, std::uint64_t> controls_;  // global rank -> session
  std::map<int, std::uint64_t> left_;      // ranks that said farewell, and the incarnation that did
  std::map<int, std::uint64_t> moved_;     // ranks said to be another process's now, and the incarnation that said so
  Prepared plan_;
  Generation held_ = 0;      // callers for links wait for the verdict on this switch
  Generation given_up_ = 0;  // the rank is another process's since this switch
  RateLimitedLog log_;
  int unauthenticated_ = 0;
  std::uint64_t last_tick_ms_ = 0;
  std::optional<AbortCause> last_abort_;  // told again to whoever connects later
};

}  // namespace trainmover
