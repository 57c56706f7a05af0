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
constexpr int kRefusedAttemptsMax = 5;              // nobody listens where a rank is known to listen: it is gone
constexpr std::uint64_t kHeartbeatsPerTimeout = 4;
constexpr std::size_t kPassedDescriptorsMax = 2;
constexpr unsigned kNoDescriptorsPauseUs = 10'000;

}  // namespace trainmover
