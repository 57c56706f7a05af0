// Warnings to standard error, at most a few a second, so that hostile traffic cannot fill a disk.
#pragma once

#include <cstdio>
#include <string>

#include "base/clock.h"

namespace trainmover {

/// One thread only (the control plane's).
class RateLimitedLog {
 public:
  void warn(int global_rank, const std::string& text) {
    const std::uint64_t second = monotonicMs() / 1000;
    if (second != second_) {
      if (suppressed_ > 0) std::fprintf(stderr, "trainmover[%d]: %d more warnings\n", global_rank, suppressed_);
      second_ = second;
      written_ = suppressed_ = 0;
    }
    if (++written_ > kPerSecond) {
      ++suppressed_;
      return;
    }
    std::fprintf(stderr, "trainmover[%d]: %s\n", global_rank, text.c_str());
  }

 private:
  static constexpr int kPerSecond = 5;
  std::uint64_t second_ = 0;
  int written_ = 0, suppressed_ = 0;
};

}  // namespace trainmover
