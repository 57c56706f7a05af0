// What the fuzzers share: mutations of valid messages, and the loop that runs a target for a number of seconds under a
// watchdog. Standalone, so that any compiler will do; the sanitizers they are built with find what goes wrong.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace trainmover::fuzzing {

using Bytes = std::vector<std::uint8_t>;

/// Ends the process with the reason; `condition` is an invariant of the code under test.
inline void require(bool condition, const char* invariant) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", invariant);
  std::abort();
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  /// 0 .. limit - 1; 0 for limit 0.
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : engine_() % limit; }
  std::uint8_t byte() { return static_cast<std::uint8_t>(engine_()); }
  bool oneIn(std::size_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

constexpr std::size_t kInputBytesMax = 4096;

/// Puts an extreme number of 1, 2, 4 or 8 bytes somewhere.
inline void plantNumber(Random& random, Bytes& bytes) {
  static const std::uint64_t kNumbers[] = {0,          1,
                                           2,          255,
                                           256,        257,
                                           1023,       1024,
                                           1025,       0x7fff,
                                           0x8000,     0xffff,
                                           0x10000,    0x7fffffff,
                                           0x80000000, 0xffffffff,
                                           ~0ULL,      1ULL << 40,
                                           1ULL << 63, 16384,
                                           16385,      (1ULL << 40) + 1};
  const std::size_t width = std::size_t{1} << random.below(4);
  if (bytes.size() < width) return;
  const std::uint64_t number = kNumbers[random.below(sizeof kNumbers / sizeof kNumbers[0])];
  // Half of the time at the beginning, where the length is.
  const std::size_t at = random.oneIn(2) ? 0 : random.below(bytes.size() - width + 1);
  for (std::size_t i = 0; i < width; ++i) bytes[at + i] = static_cast<std::uint8_t>(number >> (8 * i));
}

inline void mutateOnce(Random& random, Bytes& bytes, const std::vector<Bytes>& seeds) {
  const std::size_t at = random.below(bytes.size());
  const std::size_t length = random.below(std::min<std::size_t>(bytes.size() - at, 64) + 1);
  const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  switch (random.below(7)) {
    case 0:  // a bit
      if (!bytes.empty()) bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ (1U << random.below(8)));
      break;
    case 1:  // a byte
      if (!bytes.empty()) bytes[at] = random.byte();
      break;
    case 2:
      bytes.insert(position, 1 + random.below(16), random.byte());
      break;
    case 3:
      bytes.erase(position, position + static_cast<std::ptrdiff_t>(length));
      break;
    case 4: {  // a part, twice
      const Bytes part(position, position + static_cast<std::ptrdiff_t>(length));
      bytes.insert(position, part.begin(), part.end());
      break;
    }
    case 5: {  // the rest of another message
      const Bytes& other = seeds[random.below(seeds.size())];
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(random.below(other.size())), other.end());
      break;
    }
    default:
      plantNumber(random, bytes);
  }
  if (bytes.size() > kInputBytesMax) bytes.resize(kInputBytesMax);
}

/// A seed with zero to seven mutations.
inline Bytes mutated(Random& random, const std::vector<Bytes>& seeds) {
  Bytes bytes = seeds[random.below(seeds.size())];
  for (std::size_t count = random.below(8); count > 0; --count) mutateOnce(random, bytes, seeds);
  return bytes;
}

/// Arguments: seconds (default 10), seed (default from the clock). Calls `once(random)` until the time is over; a call
/// that does not return within ten seconds is a hang, and the alarm ends the process.
template <typename Once>
int run(int argc, char** argv, Once once) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : static_cast<std::uint64_t>(now);
  std::printf("seed %llu, %.0f seconds\n", static_cast<unsigned long long>(seed), seconds);
  std::fflush(stdout);
  Random random(seed);
  const auto start = std::chrono::steady_clock::now();
  unsigned long long executions = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    alarm(10);
    for (int i = 0; i < 256; ++i) once(random);
    executions += 256;
  }
  alarm(0);
  std::printf("seed %llu: %llu executions, nothing found\n", static_cast<unsigned long long>(seed), executions);
  return 0;
}

}  // namespace trainmover::fuzzing
