// See flight_recorder.h.
#include "runtime/flight_recorder.h"

#include <algorithm>
#include <utility>

namespace trainmover {

std::uint64_t FlightRecorder::add(FlightRecord record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t id = next_++;
  if (!ring_.empty()) {
    record.record_id = id;
    ring_[id % ring_.size()] = std::move(record);
  }
  return id;
}

void FlightRecorder::update(std::uint64_t id, FlightRecord::State state, std::uint64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (id >= next_ || next_ - id > ring_.size()) {
    return;  // never given out, or overwritten since
  }
  FlightRecord& record = ring_[id % ring_.size()];
  record.state = state;
  if (state == FlightRecord::State::kStarted) {
    record.started_ns = now_ns;
  } else if (state == FlightRecord::State::kCompleted || state == FlightRecord::State::kFailed) {
    record.ended_ns = now_ns;
  }
}

std::vector<FlightRecord> FlightRecorder::records() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t kept = std::min<std::uint64_t>(next_, ring_.size());
  std::vector<FlightRecord> records;
  records.reserve(kept);
  for (std::uint64_t id = next_ - kept; id < next_; ++id) {
    records.push_back(ring_[id % ring_.size()]);
  }
  return records;
}

std::size_t FlightRecorder::heldBytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t bytes = ring_.capacity() * sizeof(FlightRecord);
  for (const FlightRecord& record : ring_) {
    bytes += record.communicator.capacity();
  }
  return bytes;
}

}  // namespace trainmover
