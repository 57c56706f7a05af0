#include "flat/flat_operation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "collectives/names.h"

namespace trainmover::flat {

FlatOperation::FlatOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence,
                             const CollectiveCall& call)
    : PendingOperation(engine), owner_(std::move(group)), group_(*owner_), sequence_(sequence), call_(call) {}

bool FlatOperation::advance() {
  moved = false;
  const Status status = step();
  moved = status != Status::kWaiting;
  return status == Status::kDone;
}

// Every rank reads from every other, or waits until the others have read; one that has left is needed no more.
bool FlatOperation::waitsFor(int group_rank) const { return !group_.hasLeft(group_rank, sequence_); }

void FlatOperation::makeOffer(std::uint64_t bytes, std::uint64_t address, std::uint64_t shape) {
  Offer& offer = group_.offer(sequence_, rank());
  offer.bytes = bytes;
  offer.shape = shape;
  offer.address = address;
  offer.kind = static_cast<std::uint8_t>(call_.kind);
  offer.dtype = static_cast<std::uint8_t>(call_.dtype);
  offer.op = static_cast<std::uint8_t>(call_.op);
  offer.root = static_cast<std::int16_t>(call_.root);
  offer.sequence.store(sequence_, std::memory_order_release);
}

void FlatOperation::checkOffer(int rank) const {
  const Offer& mine = group_.offer(sequence_, group_.rank());
  const Offer& theirs = group_.offer(sequence_, rank);
  const bool current = theirs.sequence.load(std::memory_order_acquire) == sequence_;
  if (current && theirs.kind == mine.kind && theirs.bytes == mine.bytes && theirs.shape == mine.shape &&
      theirs.dtype == mine.dtype && theirs.op == mine.op && theirs.root == mine.root) {
    return;
  }
  const auto describe = [](const Offer& offer) {
    return std::string(nameOf(static_cast<CollectiveKind>(offer.kind))) + " of " + std::to_string(offer.bytes) +
           " bytes (root " + std::to_string(offer.root) + ", type " + std::to_string(offer.dtype) + ", operator " +
           std::to_string(offer.op) + ", pieces " + std::to_string(offer.shape) + ")";
  };
  throw CollectiveMismatch("group rank " + std::to_string(rank) + " called " + describe(theirs) + ", this rank " +
                           describe(mine) + "; all ranks of a group must make the same calls in the same order");
}

// Ranks that call different operations wait for different arrivals, so none may ever see the others': a slow look.
void FlatOperation::inspect() {
  if (group_.offer(sequence_, rank()).sequence.load(std::memory_order_acquire) != sequence_) return;
  for (int other = 0; other < size(); ++other) {
    const Offer& offer = group_.offer(sequence_, other);
    const bool current = offer.sequence.load(std::memory_order_acquire) == sequence_;
    const Offer& mine = group_.offer(sequence_, rank());
    if (current && (offer.kind != mine.kind || offer.root != mine.root)) checkOffer(other);
  }
}

bool canServe(const Group& group, const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kBarrier:
      return true;  // staged, whatever the size
    default:
      return group.crossMemory();
  }
}

}  // namespace trainmover::flat
