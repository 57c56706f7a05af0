// Time, in one place. Monotonic for limits, wall clock for the flight recorder only.
#pragma once

#include <time.h>

#include <cstdint>

namespace trainmover {

inline std::uint64_t nowNs(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}
inline std::uint64_t monotonicNs() { return nowNs(CLOCK_MONOTONIC); }
inline std::uint64_t monotonicMs() { return monotonicNs() / 1'000'000u; }
/// Milliseconds from `since` to `now`; 0 when `now` was read before `since`.
inline std::uint64_t elapsedMs(std::uint64_t since, std::uint64_t now) { return now > since ? now - since : 0; }
inline std::uint64_t wallClockNs() { return nowNs(CLOCK_REALTIME); }

}  // namespace trainmover
