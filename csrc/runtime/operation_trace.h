// A file with a line for each operation that ends well: what it was given, and what it gave, as hashes. Two runs of one
// job are compared by it (megatron/resilience/proof), to say in which operation they first part. Off unless asked for:
// every byte that an operation moves is read once more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "runtime/communicator.h"
#include "runtime/flight_recorder.h"

namespace trainmover {

/// 64 bits over `bytes` at `data`, going on from `hash`. A change of one word always changes it. No secret keeps it.
std::uint64_t hashOf(const void* data, std::size_t bytes, std::uint64_t hash);

class OperationTrace;

/// One operation between its start and its end.
class TracedOperation {
 public:
  TracedOperation(OperationTrace& trace, std::string line, bool receives, std::vector<Buffer> outputs)
      : trace_(trace), line_(std::move(line)), receives_(receives), outputs_(std::move(outputs)) {}

  /// All outputs are there, and nobody knows yet. `received_bytes`: how much of the buffer a receive has filled.
  void ended(std::size_t received_bytes);

 private:
  OperationTrace& trace_;
  std::string line_;
  const bool receives_;
  std::vector<Buffer> outputs_;
};

class OperationTrace {
 public:
  /// Opens `path`, followed by the number of this process. Throws TransportError.
  explicit OperationTrace(const std::string& path);

  /// Reads what the operation is given. `facts` as the flight recorder has them; `inputs`: empty for one that is given
  /// nothing.
  std::unique_ptr<TracedOperation> started(const FlightRecord& facts, const std::vector<int>& global_ranks,
                                           const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs);

 private:
  friend class TracedOperation;
  /// In one piece, so that a process that is killed leaves whole lines. Ends the trace, with a warning, at an error.
  void write(const std::string& line);

  std::string path_;
  Descriptor file_;
  std::atomic<bool> broken_{false};
};

/// What of a collective call is read before it starts: of an operation in place, the output.
const std::vector<Buffer>& givenTo(const CollectiveCall& call, int rank);

}  // namespace trainmover
