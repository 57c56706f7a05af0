// Links between ranks of one machine: two rings of bytes in a shared segment, and reads straight from the peer's memory
// where the kernel permits. Made by runtime/link_maker.cc, once the segment's descriptor was passed over.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/mapping.h"
#include "transport/link.h"

namespace trainmover::shm {

constexpr std::size_t kRingBytes = std::size_t{256} << 10;  // power of two

/// Bytes of the segment of one link.
std::size_t segmentBytes();

/// True when this process may read the memory of process `pid`: copies a known word of it. `address` is where that
/// process holds `expected`.
bool mayReadMemoryOf(std::int64_t pid, std::uint64_t address, std::uint64_t expected);

/// Copies `bytes` at `address` in process `pid` to `to`; false when the process or the memory is gone.
bool readMemoryOf(std::int64_t pid, std::uint64_t address, void* to, std::size_t bytes);

struct LinkConfig {
  bool creator = false;             // which of the two ends this is
  bool read_remote = false;         // allowed here; whether it works is tried
  std::function<void()> ring_peer;  // rings the peer's doorbell
};

std::unique_ptr<Link> makeLink(Mapping segment, LinkConfig config);

}  // namespace trainmover::shm
