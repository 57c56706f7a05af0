// Every limit of the control plane.
#pragma once

#include <cstdint>

namespace trainmover {

constexpr int kTickMs = 100;                        // how often limits are looked at
constexpr int kBusyTickMs = 10;                     // while connections are to be made
constexpr int kUnauthenticatedMax = 256;            // connections that have not proved who they are
constexpr std::uint64_t kHandshakeLimitMs = 5'000;  // to prove it
constexpr int kParkedMax = 4096;                    // authenticated, waiting for something of ours
constexpr std::uint64_t kRetryMs = 20;              // between attempts
constexpr std::uint64_t kStaleRetryMs = 100;        // the same, after "stale": until somebody tells where to call
constexpr std::uint64_t kGoneAfterMs = 800;         // nobody listens where a rank did, and nobody tells where it is now
constexpr int kRefusedAttemptsMax = 5;              // nobody listens where a joiner is said to listen: it is gone
constexpr std::uint64_t kHeartbeatsPerTimeout = 4;
constexpr std::size_t kPassedDescriptorsMax = 2;
constexpr std::size_t kIncomingBytesMax = std::size_t{1} << 20;    // of a joiner that is live before this rank commits
constexpr std::size_t kOutgoingBytesMax = std::size_t{256} << 10;  // of notes that a slow peer has not taken
constexpr unsigned kNoDescriptorsPauseUs = 10'000;

}  // namespace trainmover
