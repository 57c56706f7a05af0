// Everything of the data plane that exists once a process: identity, directory, listener, progress thread, liveness,
// generation. Created by trainmover_ext (torch/bindings.cc) when the first group is made.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "runtime/communicator.h"
#include "runtime/flight_recorder.h"
#include "runtime/notes.h"

namespace trainmover {

/// Choices that may differ from rank to rank. Read from flag and environment by trainmover_ext/settings.py, once.
struct Settings {
  std::string bind_address = "127.0.0.1";  // address of this machine that the others reach: listener and links
  std::string machine_id;                  // ranks with equal ids share memory; empty: host boot id + network namespace
  std::uint64_t peer_timeout_ms = 30'000;  // silence after which a peer counts as lost
  std::uint64_t connect_timeout_ms = 60'000;
  bool use_shared_memory = true;     // false: tcp between all ranks (tests, benchmarks)
  bool use_cross_memory = true;      // false: never process_vm_readv, as where the kernel forbids it
  std::uint32_t local_ranks = 1;     // ranks of this job on this machine: spin only when there is a core for each
  std::string flight_recorder_path;  // prefix of the dump's file name (the global rank is appended); empty: none
  std::uint32_t flight_recorder_entries = 2000;
  std::string trace_path;  // prefix of the file of operations (global rank and process are appended); empty: none
};

/// Must be equal on all ranks: hashed into every handshake.
struct JobIdentity {
  std::string job_id;
  std::string token;      // secret; never logged
  std::string constants;  // canonical text: versions, thresholds
};

/// Where a rank is reached. Encoded as text for the store, the launcher, the agent.
struct Endpoint {
  std::uint64_t incarnation = 0;
  std::string machine_id;
  std::string address;  // host:port of the TCP listener
  std::string socket;   // name of the abstract unix socket
  std::int64_t pid = 0;
};

enum class Mode { kLive, kIsolated };

struct MemoryStats {
  // bytes by kind
  std::uint64_t shared_segments = 0, link_buffers = 0, unexpected_messages = 0, scratch = 0, flight_recorder = 0;
};

/// How far a prepared switch is; see switch_plan.h. Of a joiner: kReady, or kBroken.
enum class SwitchPhase { kPending, kReady, kBroken };
struct SwitchState {
  SwitchPhase phase = SwitchPhase::kPending;
  std::string reason;  // of kBroken
};

/// What a commit did to the live links of one communicator. Dropped ones were not prepared: they connect at first use.
struct LinkTally {
  std::string name;
  std::uint64_t kept = 0, replaced = 0, dropped = 0;
};

/// A communicator's place in its order of operations: whoever takes over a rank goes on from there.
struct Place {
  std::uint64_t started = 0, messages = 0, scheduled = 0;
};

/// What a leaver's rank hands over to the process that takes it: the last recovery, and its place in each communicator.
struct Handover {
  Generation recovery = 1;
  std::map<std::string, Place> places;
};

/// Messages and connections of the control plane so far; heartbeats are not counted.
struct ControlStats {
  std::uint64_t messages_sent = 0, messages_received = 0, connections_made = 0, connections_accepted = 0, refused = 0;
};

class Runtime {
 public:
  /// Starts listener and progress thread.
  static std::shared_ptr<Runtime> create(int global_rank, JobIdentity identity, Settings settings, Mode mode);
  virtual ~Runtime() = default;

  virtual int globalRank() const = 0;
  virtual Mode mode() const = 0;
  virtual void setMode(Mode mode) = 0;
  virtual const Settings& settings() const = 0;

  virtual Endpoint endpoint() const = 0;
  /// Makes endpoints known, of slots that last changed hands in `generation`. Later ones replace earlier ones of the
  /// same rank, but for those of an older generation; then idle connections to the process before go, without a word.
  virtual void addEndpoints(const std::map<int, Endpoint>& endpoints, Generation generation = 1) = 0;
  virtual bool knows(int global_rank) const = 0;

  /// `name` is the same on all members and unique in the job; `global_ranks[i]` is the global rank of group rank i.
  virtual std::shared_ptr<Communicator> createCommunicator(const std::string& name, std::vector<int> global_ranks,
                                                           std::chrono::milliseconds timeout) = 0;

  virtual Generation generation() const = 0;
  /// Every blocked and later operation of this and older generations raises CollectiveAborted, here and on all peers
  /// that can be told. Returns at once; from any thread. `culprit`: a global rank, or -1.
  virtual void abortCollectives(int culprit, const std::string& why) = 0;
  /// Enters `generation`: old links are dropped, new ones are made at first use; a switch under way is forgotten.
  /// `endpoints`: of the slots that change hands in it; with the entry in one step, as who holds them may call at once.
  /// Throws SwitchError unless it is newer than any generation known here.
  virtual void resume(Generation generation, const std::map<int, Endpoint>& endpoints = {}) = 0;
  virtual bool aborted() const = 0;

  // The switch (docs/decisions/0009). Throw SwitchError, with nothing changed, when it is not their turn.

  /// Stayer: connects, in the background and beside the live links, to the processes at `moved` for each link that
  /// lives to those ranks. Returns at once.
  virtual void prepareSwitch(Generation generation, const std::map<int, Endpoint>& moved) = 0;
  virtual SwitchState switchState(Generation generation) = 0;
  /// Stayer: makes what is prepared live and drops what is not. Never waits for anybody. Legal with nothing outstanding
  /// on links to ranks that move.
  virtual std::vector<LinkTally> commitSwitch(Generation generation) = 0;
  /// Stayer: drops what was prepared. Leaver: lets callers in again. Joiner: drops its connections. Idempotent.
  virtual void abortSwitch(Generation generation) = 0;
  /// Leaver: from now on no link is made to this process. Returns linkedRanks() as they stay. Blocks up to a second.
  virtual std::vector<int> holdLinks(Generation generation) = 0;
  virtual Handover handover() const = 0;
  /// Leaver: the rank is another process's now. Drops all connections; nobody's end means anything here any more.
  /// Blocks until the peers were told, at most half a second.
  virtual void leaveSwitch(Generation generation) = 0;
  /// Joiner, isolated: its slot changes hands in `generation`, of which it accepts connections from now on.
  virtual void joinSwitch(Generation generation) = 0;
  /// Joiner: becomes live at the place that the leaver has handed over.
  virtual void goLive(Generation generation, const Handover& handover) = 0;
  /// Global ranks to which a link lives, or with which a segment is shared.
  virtual std::vector<int> linkedRanks() const = 0;

  /// Queues a note for `peer`, in order, over the live control channel, which is made if there is none. Throws
  /// std::invalid_argument for more than kNoteBytesMax, TransportError when too many wait.
  virtual void sendNote(int peer, Generation generation, std::string payload) = 0;
  /// The oldest note that has come; waits up to `timeout` for one.
  virtual std::optional<Note> receiveNote(std::chrono::milliseconds timeout) = 0;

  virtual ControlStats controlStats() const = 0;
  virtual MemoryStats memoryStats() const = 0;
  virtual std::vector<CommunicatorStats> communicatorStats() const = 0;
  virtual FlightRecorder& flightRecorder() = 0;
  /// Operations that start from now on belong to `iteration` of the training loop, in flight records and traces.
  virtual void noteIteration(std::uint64_t iteration) = 0;
  /// Called once per abort with the flight recorder's records, from the progress thread, no lock held.
  virtual void onAbort(std::function<void()> callback) = 0;

  /// Tells peers that this process leaves on purpose, and releases everything. Idempotent.
  virtual void shutdown() = 0;
};

}  // namespace trainmover
