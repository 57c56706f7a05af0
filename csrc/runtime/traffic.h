// What a communicator counts of its work, for communicator_stats().
#pragma once

#include <atomic>
#include <cstdint>

namespace trainmover {

/// Under the engine's lock. Over links: what went through them, headers included. Over a shared segment: what this rank
/// put up for others, once however many fetch it, and what it fetched from them.
struct Traffic {
  std::uint64_t bytes_sent = 0, bytes_received = 0;
};

/// Of callers that waited for an operation, from any thread.
struct WaitCounters {
  std::atomic<std::uint64_t> waits{0}, sleeps{0}, wait_ns{0};
};

}  // namespace trainmover
