// SHA-256 (FIPS 180-4) and HMAC (RFC 2104) over it, for the handshake: no library of the core's has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace trainmover {

std::array<std::uint8_t, 32> sha256(const void* data, std::size_t bytes);
std::array<std::uint8_t, 32> hmacSha256(const std::string& key, const void* data, std::size_t bytes);
/// Compares in time that does not depend on where the two differ.
bool equalDigests(const std::array<std::uint8_t, 32>& a, const std::array<std::uint8_t, 32>& b);

}  // namespace trainmover
