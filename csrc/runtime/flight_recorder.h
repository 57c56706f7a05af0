// The last operations of this rank, for whoever asks after a hang what each rank was doing. A ring of fixed size;
// trainmover_ext writes it in the format of torch's own flight recorder.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/types.h"

namespace trainmover {

struct FlightRecord {
  enum class State : std::uint8_t { kScheduled, kStarted, kCompleted, kFailed };
  std::uint64_t record_id = 0;  // counts from 0
  std::string communicator;     // name
  const char* operation = "";   // "all_reduce", "send 0->1", as torch names them
  int peer = -1;                // group rank for point-to-point
  bool point_to_point = false;
  std::uint64_t sequence = 0;  // collectives and point-to-point are numbered apart, per communicator
  std::uint64_t input_bytes = 0, output_bytes = 0;
  DataType dtype = DataType::kUInt8;  // of a reduction; kUInt8 where only bytes are moved
  std::uint64_t generation = 0;
  std::uint64_t iteration = 0;  // of the training loop; 0: before the first, or nobody tells
  std::uint64_t timeout_ms = 0;
  std::uint64_t created_ns = 0, started_ns = 0, ended_ns = 0;  // CLOCK_REALTIME; 0: not yet
  State state = State::kScheduled;
};

class FlightRecorder {
 public:
  explicit FlightRecorder(std::size_t entries) : ring_(entries) {}

  /// Stores `record` and returns its id.
  std::uint64_t add(FlightRecord record);
  /// Moves record `id` to `state`, unless it was overwritten.
  void update(std::uint64_t id, FlightRecord::State state, std::uint64_t now_ns);
  /// Oldest first.
  std::vector<FlightRecord> records() const;
  std::size_t heldBytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<FlightRecord> ring_;
  std::uint64_t next_ = 0;
};

}  // namespace trainmover
