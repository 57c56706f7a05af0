// The communicator: queues collectives, runs them one after the other, point-to-point beside them, over the shared
// segment when all ranks share a machine and over links otherwise. Owned by the runtime; driven by the engine.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "flat/group.h"
#include "runtime/channel.h"
#include "runtime/communicator.h"
#include "runtime/engine.h"
#include "runtime/link_source.h"
#include "runtime/message_operation.h"
#include "runtime/runtime.h"
#include "runtime/scheduled_operation.h"

namespace trainmover {

/// How long a closed link may stay unexplained before its peer counts as lost.
constexpr std::uint64_t kBrokenLinkGraceMs = 300;
/// How long what a rank sent before it left may take to come.
constexpr std::uint64_t kFarewellGraceMs = 2000;

/// What a communicator needs of the process. The runtime.
class CommunicatorHost {
 public:
  virtual ~CommunicatorHost() = default;
  virtual Engine& engine() = 0;
  virtual LinkSource& links() = 0;
  virtual FlightRecorder& recorder() = 0;
  /// Null: nobody asked for one.
  virtual OperationTrace* trace() = 0;
  /// Of the training loop: what operations are noted with.
  virtual std::uint64_t iteration() const = 0;
  virtual bool isolated() const = 0;
  /// The last recovery: what operations and aborts bear.
  virtual Generation currentGeneration() const = 0;
  /// What links to `global_rank` bear.
  virtual Generation pairGeneration(int global_rank) const = 0;
  /// Under the engine's lock: true when a switch under way makes links of `generation` to `global_rank`.
  virtual bool prepares(Generation generation, int global_rank) const = 0;
  /// Under the engine's lock: such a link is there.
  virtual void linkPrepared(std::uint64_t communicator, int global_rank) = 0;
  /// Throws CollectiveAborted while the generation is aborted.
  virtual void checkUsable() const = 0;
  /// The communicator is closed: nobody will look for it any more.
  virtual void closed(std::uint64_t communicator, std::uint64_t serial) = 0;
  /// An operation failed here: the whole generation is aborted, and the others are told.
  virtual void failed(int culprit, const std::string& why, bool lost) = 0;
};

struct CommunicatorConfig {
  std::string name;
  std::uint64_t id = 0;
  std::vector<int> global_ranks;
  int rank = 0;
  std::chrono::milliseconds timeout{0};
  std::uint64_t serial = 0;  // tells communicators of one name, one after the other, apart
};

class CommunicatorImpl final : public Communicator,
                               public Driven,
                               public LinkUser,
                               private Messenger,
                               public std::enable_shared_from_this<CommunicatorImpl> {
 public:
  CommunicatorImpl(CommunicatorHost& host, CommunicatorConfig config);
  ~CommunicatorImpl() override;

  int size() const override { return static_cast<int>(config_.global_ranks.size()); }
  int rank() const override { return config_.rank; }
  const std::string& name() const override { return config_.name; }
  std::uint64_t id() const { return config_.id; }
  bool isClosed() const { return closed_.load(); }
  const std::vector<int>& globalRanks() const { return config_.global_ranks; }

  std::shared_ptr<Operation> start(const CollectiveCall& call) override;
  std::shared_ptr<Operation> send(Buffer buffer, int peer, std::int64_t tag, std::chrono::milliseconds timeout,
                                  bool waited_at_once) override;
  std::shared_ptr<Operation> receive(Buffer buffer, int peer, std::int64_t tag, std::chrono::milliseconds timeout,
                                     bool waited_at_once) override;
  void setTimeout(std::chrono::milliseconds timeout) override { config_.timeout = timeout; }
  void sleepWhileWaiting() override { sleeps_.store(true, std::memory_order_relaxed); }
  std::uint64_t sequence() const override { return started_.load(std::memory_order_relaxed); }
  CommunicatorStats stats() const override;
  void close() override;
  /// Under the engine's lock: adds what this communicator holds.
  void addMemory(MemoryStats& stats) const;

  bool advance() override;
  void checkLimits(std::uint64_t now_ms) override;
  bool outstanding() const override;
  bool waitsForSockets() const override;
  void fail(const AbortCause& cause) override;

  void linkReady(Generation generation, int global_rank, std::unique_ptr<Link> link) override;
  void segmentReady(Generation generation, Mapping segment) override;
  /// Under the engine's lock: forgets all of older generations.
  void resume();
  /// Under the engine's lock: `global_rank` has left on purpose; what waits for it cannot end any more.
  void peerLeft(int global_rank);

  // The switch (communicator_switch.cc); all under the engine's lock.

  /// Adds the global ranks to which a link lives, or with which the segment is shared.
  void addLinked(std::set<int>& global_ranks) const;
  bool hasLinkTo(int global_rank) const;
  bool sharesSegmentWith(int global_rank) const;
  /// What is outstanding that needs a link to one of the ranks that move; empty: nothing.
  std::string busyWith(const std::map<int, Endpoint>& moved) const;
  /// What is outstanding at all, for a leaver; empty: nothing.
  std::string busy() const;
  /// Frames of operations that have ended still wait for room.
  bool hasUnsent() const;
  /// True when all ranks, `moved` at their new places, would share this machine.
  bool wouldBeLocal(const std::map<int, Endpoint>& moved, const std::string& machine_id) const;
  /// Drops prepared links whose other end is gone; their global ranks.
  std::vector<int> dropBrokenPrepared();
  /// Throws nothing: what could fail was done before.
  LinkTally commit(const std::map<int, Endpoint>& moved, Generation generation);
  void dropPrepared() { prepared_.clear(); }
  /// The global rank of a prepared link whose other end is gone; -1: none.
  int brokenPrepared() const;
  /// `global_rank` is another process by now, which this rank has only just heard: idle links to the old one go.
  void peerMoved(int global_rank);
  /// This rank is another process's now.
  void leave() { dropLinks(); }
  /// This rank has joined: forgets what it had, then goes on from `place`.
  void forgetLinks() { resume(); }
  void take(const Place& place);
  Place place() const;
  /// Drops links whose other end is gone; their global ranks.
  std::vector<int> dropClosed();

 private:
  class QueuedCollective;

  std::shared_ptr<Operation> startMessage(Buffer buffer, int peer, std::int64_t tag, std::chrono::milliseconds timeout,
                                          bool is_send, bool waited_at_once);
  void submit(Transfer& transfer) override;
  void submitAnySource(Transfer& transfer);
  Transfer* takeAnySource(FrameClass message_class, std::uint64_t key);
  /// The operation proper, once its turn has come; null while the group is still being joined.
  std::unique_ptr<PendingOperation> makeOperation(CollectiveCall& call, const Shape& shape);
  std::unique_ptr<PendingOperation> makeScheduled(CollectiveCall& call, const Shape& shape);
  bool groupReady();
  bool allLocal();
  bool advanceChannels();
  bool advanceCollectives();
  bool advanceMessages();
  void linkBroke(int peer, const std::string& why);
  void failAll(const std::string& why);
  void failFront(const std::shared_ptr<PendingOperation>& front, const std::string& why);
  bool checkBroken(std::uint64_t now_ms);
  bool checkLeft(std::uint64_t now_ms);
  bool needs(int peer, bool also_links) const;
  void dropLinks();
  void record(PendingOperation& operation, FlightRecord facts, std::chrono::milliseconds timeout,
              const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs);
  std::shared_ptr<Operation> finishedAtOnce();
  /// Throws CollectiveAborted when no operation may start here any more.
  void checkOpen() const;
  void handOver(const PendingOperation& operation, bool waited_at_once);
  int groupRankOf(int global_rank) const;
  Channel* channelTo(int global_rank) const;
  void makeChannel(int peer, Generation generation, std::unique_ptr<Link> link);
  void dropChannel(int peer);
  std::string waitedFor(const PendingOperation& operation) const;

  CommunicatorHost& host_;
  Engine& engine_;
  CommunicatorConfig config_;
  std::unordered_map<int, int> group_ranks_;  // by global rank
  std::atomic<std::uint64_t> started_{0};
  std::uint64_t messages_started_ = 0;
  std::atomic<bool> closed_{false};

  std::deque<std::shared_ptr<PendingOperation>> collectives_;
  std::vector<std::shared_ptr<MessageOperation>> messages_;
  std::vector<std::unique_ptr<Channel>> channels_;           // by group rank; null: no link yet
  std::vector<int> linked_;                                  // group ranks with a channel
  std::unordered_map<int, std::unique_ptr<Link>> prepared_;  // beside them, for the switch under way
  std::unordered_map<int, std::vector<Transfer*>> waiting_;  // for a link, by group rank
  std::vector<Transfer*> any_source_;
  Traffic traffic_;
  std::uint64_t links_kept_ = 0, links_replaced_ = 0;
  const std::shared_ptr<WaitCounters> waits_ = std::make_shared<WaitCounters>();

  enum class Locality { kUnknown, kLocal, kSpread };
  Locality locality_ = Locality::kUnknown;
  bool segment_asked_ = false;
  Mapping segment_;
  std::shared_ptr<flat::Group> group_;
  bool group_joined_ = false;
  std::uint64_t flat_sequence_ = 0, scheduled_sequence_ = 0;

  struct Broken {
    int peer = -1;
    std::uint64_t since_ms = 0;
    std::string why;
  };
  Broken broken_;  // a link closed: an abort that explains it may be on its way
  std::atomic<bool> sleeps_{false};
  bool dead_ = false;  // an operation failed and the links are gone: nothing moves until it is failed or resumed
  std::unordered_map<int, std::uint64_t> left_since_ms_;  // group ranks that said farewell
};

}  // namespace trainmover
