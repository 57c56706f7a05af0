// The interface every transport offers (shm, tcp; rdma next): one connection between two ranks of one communicator, as
// an ordered, reliable stream of bytes each way that never blocks. Framing, matching and flow control are above, in
// runtime/channel.cc, once for all. tests/cpp/link_conformance.h runs on each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trainmover {

/// A piece of memory to be written.
struct IoSlice {
  const void* data;
  std::size_t bytes;
};

/// Used by one thread at a time (the holder of the engine's lock).
class Link {
 public:
  virtual ~Link() = default;

  /// Takes as much of `parts`, in order, as there is room for; returns the bytes taken, 0 when there is no room now.
  /// What was taken may be overwritten by the caller at once. Throws LinkClosed when the peer's end is gone.
  virtual std::size_t write(const IoSlice* parts, int count) = 0;

  /// Reads up to `bytes`; 0 when nothing is there now. Throws LinkClosed after the last byte the peer wrote.
  virtual std::size_t read(void* data, std::size_t bytes) = 0;

  /// True when readRemote() works on this link: a receiver may fetch a large message straight from its sender.
  virtual bool canReadRemote() const = 0;

  /// Copies `bytes` at `address` of the peer's process to `to`. Throws LinkClosed when the peer is gone.
  virtual void readRemote(std::uint64_t address, void* to, std::size_t bytes) = 0;

  /// Descriptor that becomes readable or writable when this link moves, or -1 when the process's doorbell rings
  /// instead.
  virtual int descriptor() const = 0;

  /// Wakes the peer if it sleeps and what was written since the last call could matter to it. No-op where the kernel
  /// does so by itself.
  virtual void notify() = 0;

  /// Takes the memory that it needs to move data: once, when it becomes live. Until then it holds next to none.
  virtual void activate() {}

  /// True when the peer's end is gone, as far as can be seen without reading; what came before can still be read.
  virtual bool isClosed() const = 0;

  /// Bytes of memory that this link holds in this process (buffers, mapped segments).
  virtual std::size_t heldBytes() const = 0;

  /// "shm", "tcp".
  virtual const char* transport() const = 0;
};

}  // namespace trainmover
