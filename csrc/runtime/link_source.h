// What communicators ask the control plane for, and what it answers. The answers arrive under the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/mapping.h"
#include "base/types.h"
#include "runtime/doorbell.h"
#include "transport/link.h"

namespace trainmover {

/// The control plane as a communicator sees it. Any thread; never blocks.
class LinkSource {
 public:
  virtual ~LinkSource() = default;
  /// Asks for a control channel to `global_rank`: liveness, and its doorbell when it is on this machine.
  virtual void wantControl(int global_rank) = 0;
  /// Asks for a link of `communicator` to `global_rank`.
  virtual void wantLink(std::uint64_t communicator, Generation generation, int global_rank) = 0;
  /// Asks `global_rank` (group rank 0) for the shared segment of `communicator`, of `bytes`.
  virtual void wantSegment(std::uint64_t communicator, Generation generation, int global_rank, std::size_t bytes) = 0;
  /// Offers the segment that others will ask for.
  virtual void offerSegment(std::uint64_t communicator, Generation generation, Descriptor memory) = 0;
  /// True when `global_rank` shares memory with this process.
  virtual bool sharesMemory(int global_rank) const = 0;
  virtual bool knows(int global_rank) const = 0;
  /// Its doorbell, once the control channel is up; null before, and for ranks of other machines.
  virtual std::shared_ptr<PeerDoorbell> doorbellOf(int global_rank) const = 0;
  virtual bool crossMemoryAllowed() const = 0;
};

/// A communicator as the control plane sees it.
class LinkUser {
 public:
  virtual ~LinkUser() = default;
  virtual void linkReady(Generation generation, int global_rank, std::unique_ptr<Link> link) = 0;
  virtual void segmentReady(Generation generation, Mapping segment) = 0;
};

}  // namespace trainmover
