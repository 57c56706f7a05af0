// A group of ranks that communicate: the one choke point of all operations (modes live and isolated; record and replay
// later). Called by torch/backend.cc and torch/bindings.cc, from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "collectives/schedule.h"
#include "runtime/operation.h"

namespace trainmover {

class Runtime;

/// Memory of the caller's. It stays valid and, but for the operation's own writes, unchanged until the operation ends.
struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// A collective call. Which buffers are given: see the table at Shape; sizes are derived from the buffers' bytes.
/// kAllReduce and kBroadcast: one output, no input (in place), or for kAllReduce one input and one output.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;  // group rank
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  std::chrono::milliseconds timeout{0};  // 0: the communicator's
  bool waited_at_once = false;           // the caller waits in the next moment: don't bother the progress thread
};

/// See communicator_stats() of trainmover_ext, and runtime/traffic.h for what counts as sent and received.
struct CommunicatorStats {
  std::string name;
  int size = 0, rank = 0;
  std::uint64_t operations = 0, links = 0, bytes_sent = 0, bytes_received = 0, waits = 0, sleeps = 0;
  std::uint64_t wait_us = 0;
  std::uint64_t links_kept = 0, links_replaced = 0;  // over all switches
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int size() const = 0;
  virtual int rank() const = 0;
  virtual const std::string& name() const = 0;

  /// Starts a collective and returns at once. Ranks call the collectives of one communicator in the same order.
  /// Throws std::invalid_argument for buffers that contradict the kind, CollectiveError as collectives end.
  virtual std::shared_ptr<Operation> start(const CollectiveCall& call) = 0;

  /// Starts a send to, or a receive from, group rank `peer` (`kAnySource`: whoever sends first), matched by `tag` in
  /// order. A message larger than `buffer` fails the receive with CollectiveMismatch. `waited_at_once`: see
  /// CollectiveCall.
  virtual std::shared_ptr<Operation> send(Buffer buffer, int peer, std::int64_t tag, std::chrono::milliseconds timeout,
                                          bool waited_at_once = false) = 0;
  virtual std::shared_ptr<Operation> receive(Buffer buffer, int peer, std::int64_t tag,
                                             std::chrono::milliseconds timeout, bool waited_at_once = false) = 0;

  virtual void setTimeout(std::chrono::milliseconds timeout) = 0;
  /// From now on whoever waits for an operation sleeps at once, instead of looking often: for waits that last.
  virtual void sleepWhileWaiting() = 0;
  /// Collectives started so far in this generation.
  virtual std::uint64_t sequence() const = 0;
  virtual CommunicatorStats stats() const = 0;

  /// Drops links and fails what is outstanding with CollectiveAborted. Idempotent.
  virtual void close() = 0;
};

constexpr int kAnySource = -1;

}  // namespace trainmover
