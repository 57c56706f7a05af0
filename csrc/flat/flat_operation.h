// Collectives over a shared segment: base of the two kinds, those that reduce and those that only move data. Same
// results, bit for bit, as the schedules over links.
#pragma once

#include <cstdint>
#include <memory>

#include "flat/group.h"
#include "runtime/communicator.h"
#include "runtime/pending_operation.h"

namespace trainmover::flat {

class FlatOperation : public PendingOperation {
 public:
  FlatOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence, const CollectiveCall& call);

  bool advance() final;
  bool waitsFor(int group_rank) const final;
  bool needsMemoryOf(int group_rank) const final { return waitsFor(group_rank); }
  void inspect() final;

 protected:
  enum class Status { kWaiting, kMoved, kDone };
  /// One bounded piece of work.
  virtual Status step() = 0;
  /// Fills this rank's offer; the side is free.
  void makeOffer(std::uint64_t bytes, std::uint64_t address, std::uint64_t shape = 0);
  /// Throws CollectiveMismatch unless `rank`, which has arrived, has called the same.
  void checkOffer(int rank) const;

  int size() const { return group_.size(); }
  int rank() const { return group_.rank(); }

 private:
  std::shared_ptr<Group> owner_;  // what was dropped by its communicator must still be mapped

 protected:
  Group& group_;
  const std::uint64_t sequence_;
  CollectiveCall call_;
};

/// What one rank fetches from another, or the other way round: sizes of all pieces are in bytes.
std::unique_ptr<FlatOperation> makeReduceOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence,
                                                   const CollectiveCall& call);
std::unique_ptr<FlatOperation> makePullOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence,
                                                 const CollectiveCall& call);

/// True when the shared segment can serve `call`; the same answer on every rank.
bool canServe(const Group& group, const CollectiveCall& call);

}  // namespace trainmover::flat
