// Numbers to and from bytes, least significant byte first whatever the machine. Used by wire/handshake.cc and
// wire/frame.cc only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace trainmover {

/// Writes `value` to the sizeof(T) bytes at `to`.
template <typename T>
void storeLittleEndian(std::uint8_t* to, T value) {
  static_assert(std::is_unsigned_v<T>, "signed numbers are converted by the caller, who knows their range");
  for (std::size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

/// Reads the sizeof(T) bytes at `from`.
template <typename T>
T loadLittleEndian(const std::uint8_t* from) {
  static_assert(std::is_unsigned_v<T>, "signed numbers are converted by the caller, who knows their range");
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::uint64_t{from[i]} << (8 * i);
  return static_cast<T>(value);
}

}  // namespace trainmover
