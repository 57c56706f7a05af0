// SHA-256 as FIPS 180-4 section 6.2 writes it down, and HMAC as RFC 2104 does. Called by wire/handshake.cc and by those
// who digest a job's constants; speed does not matter for a few hundred bytes.
#include "wire/sha256.h"

#include <algorithm>
#include <cstring>

namespace trainmover {
namespace {

constexpr std::size_t kBlockBytes = 64;
using State = std::array<std::uint32_t, 8>;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// FIPS 180-4, 5.3.3: the same of the square roots of the first eight primes.
constexpr State kInitialState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr std::uint32_t rotateRight(std::uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

std::uint32_t loadBigEndian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 | bytes[3];
}

void compress(State& state, const std::uint8_t* block) {
  std::uint32_t schedule[64];
  for (int t = 0; t < 16; ++t) schedule[t] = loadBigEndian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const std::uint32_t w15 = schedule[t - 15];
    const std::uint32_t w2 = schedule[t - 2];
    const std::uint32_t sigma0 = rotateRight(w15, 7) ^ rotateRight(w15, 18) ^ w15 >> 3;
    const std::uint32_t sigma1 = rotateRight(w2, 17) ^ rotateRight(w2, 19) ^ w2 >> 10;
    schedule[t] = sigma1 + schedule[t - 7] + sigma0 + schedule[t - 16];
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int t = 0; t < 64; ++t) {
    const std::uint32_t sum1 = rotateRight(e, 6) ^ rotateRight(e, 11) ^ rotateRight(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t first = h + sum1 + choice + kRoundConstants[t] + schedule[t];
    const std::uint32_t sum0 = rotateRight(a, 2) ^ rotateRight(a, 13) ^ rotateRight(a, 22);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + sum0 + majority;
  }
  const State mixed = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

/// A message that comes in pieces.
class Sha256 {
 public:
  void update(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::uint8_t*>(data);
    total_ += bytes;
    while (bytes > 0) {
      const std::size_t taken = std::min(bytes, kBlockBytes - filled_);
      std::memcpy(block_.data() + filled_, from, taken);
      filled_ += taken;
      from += taken;
      bytes -= taken;
      if (filled_ < kBlockBytes) break;
      compress(state_, block_.data());
      filled_ = 0;
    }
  }

  std::array<std::uint8_t, 32> finish() {
    const std::uint64_t bits = total_ * 8;
    const std::uint8_t mark = 0x80;
    update(&mark, 1);
    const std::uint8_t zero = 0;
    while (filled_ != kBlockBytes - 8) update(&zero, 1);
    std::uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
    update(length, sizeof length);
    std::array<std::uint8_t, 32> digest;
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  State state_ = kInitialState;
  std::array<std::uint8_t, kBlockBytes> block_{};
  std::size_t filled_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace

std::array<std::uint8_t, 32> sha256(const void* data, std::size_t bytes) {
  Sha256 hash;
  hash.update(data, bytes);
  return hash.finish();
}

std::array<std::uint8_t, 32> hmacSha256(const std::string& key, const void* data, std::size_t bytes) {
  std::array<std::uint8_t, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    const auto digest = sha256(key.data(), key.size());
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  std::array<std::uint8_t, kBlockBytes> inner_key;
  std::array<std::uint8_t, kBlockBytes> outer_key;
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    inner_key[i] = padded[i] ^ 0x36;
    outer_key[i] = padded[i] ^ 0x5c;
  }
  Sha256 inner;
  inner.update(inner_key.data(), inner_key.size());
  inner.update(data, bytes);
  const auto inner_digest = inner.finish();
  Sha256 outer;
  outer.update(outer_key.data(), outer_key.size());
  outer.update(inner_digest.data(), inner_digest.size());
  return outer.finish();
}

bool equalDigests(const std::array<std::uint8_t, 32>& a, const std::array<std::uint8_t, 32>& b) {
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = static_cast<std::uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace trainmover
