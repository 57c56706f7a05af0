// Collectives that only move data, over a shared segment: every rank offers what it has, staged in its slot when short,
// else where it lies, and everyone fetches what it wants: all-gather, broadcast, gather, scatter, all-to-all, barrier.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "flat/flat_operation.h"

namespace trainmover::flat {
namespace {

constexpr std::size_t kStagedBytesMax = std::size_t{64} << 10;  // longer offers are read where they lie
constexpr std::size_t kStagedForOneMax = std::size_t{8} << 10;  // a second copy that spares one reader a system call
constexpr std::size_t kReadBytesMax = std::size_t{4} << 20;     // at one go, under the lock

class PullOperation final : public FlatOperation {
 public:
  PullOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence, const CollectiveCall& call)
      : FlatOperation(engine, std::move(group), sequence, call) {
    rooted_ = call_.kind == CollectiveKind::kBroadcast || call_.kind == CollectiveKind::kScatter;
    offers_ = !rooted_ || rank() == call_.root;
    pulls_ = call_.kind == CollectiveKind::kGather ? rank() == call_.root
                                                   : !(call_.kind == CollectiveKind::kBroadcast && offers_);
    if (call_.kind == CollectiveKind::kBroadcast) call_.inputs = call_.outputs;
  }

 private:
  enum class At { kStart, kArrived, kFinish };

  Status step() override {
    switch (at_) {
      case At::kStart:
        if (!group_.sideFree(sequence_)) return Status::kWaiting;
        begin();
        at_ = At::kArrived;
        return again();
      case At::kArrived:
        if (pulls_ || call_.kind == CollectiveKind::kBarrier) {
          if (!offersAreThere()) return Status::kWaiting;
          if (!pull()) return Status::kMoved;
        }
        group_.arrive(sequence_, 1);
        at_ = At::kFinish;
        return again();
      case At::kFinish:
        // Whoever offered memory in place waits until all have read it.
        if (in_place_ && !group_.arrived(sequence_, 1)) return Status::kWaiting;
        group_.leave(sequence_);
        return Status::kDone;
    }
    return Status::kDone;
  }

  Status again() {
    const Status status = step();
    return status == Status::kWaiting ? Status::kMoved : status;
  }

  void begin() {
    if (!rooted_) group_.expect(sequence_, 0, size());
    group_.expect(sequence_, 1, size());
    if (offers_) offerPieces();
    makeOffer(uniformBytes(), 0);
    if (!rooted_) {
      group_.arrive(sequence_, 0);
    } else if (offers_) {
      group_.announceOffer();
    }
  }

  // Of a rooted operation only the root's own offer counts: ranks that disagree about the root must not pass for it.
  bool offersAreThere() {
    if (!rooted_) return group_.arrived(sequence_, 0);
    return group_.offer(sequence_, call_.root).sequence.load(std::memory_order_acquire) == sequence_;
  }

  // Bytes of a piece where all ranks must agree on it, else 0.
  std::uint64_t uniformBytes() const {
    switch (call_.kind) {
      case CollectiveKind::kBroadcast:
        return call_.outputs[0].bytes;
      case CollectiveKind::kGather:
        return call_.inputs[0].bytes;
      case CollectiveKind::kScatter:
        return call_.outputs[0].bytes;
      default:
        return 0;
    }
  }

  // Writes this rank's table: entry i is for rank i.
  void offerPieces() {
    if (call_.kind == CollectiveKind::kBarrier) return;
    std::size_t total = 0;
    for (const Buffer& piece : call_.inputs) total += piece.bytes;
    const bool for_one = rooted_ && size() == 2;
    in_place_ = total > (for_one ? kStagedForOneMax : kStagedBytesMax);
    group_.countOffered(total);
    unsigned char* slot = group_.slot(sequence_, rank());
    Piece* table = group_.table(sequence_, rank());
    std::size_t staged = 0;
    for (int other = 0; other < size(); ++other) {
      const Buffer& piece = call_.inputs[call_.inputs.size() == 1 ? 0 : static_cast<std::size_t>(other)];
      Piece& entry = table[other];
      entry.bytes = piece.bytes;
      if (in_place_) {
        entry.address = reinterpret_cast<std::uint64_t>(piece.data);
        continue;
      }
      entry.address = call_.inputs.size() == 1 ? 0 : staged;
      if (other > 0 && call_.inputs.size() == 1) continue;
      if (piece.bytes > 0) std::memcpy(slot + staged, piece.data, piece.bytes);
      staged += piece.bytes;
    }
    group_.offer(sequence_, rank()).in_place = in_place_ ? 1 : 0;
  }

  // Fetches more; true when all is here.
  bool pull() {
    if (call_.kind == CollectiveKind::kBarrier) {
      for (int other = 0; other < size(); ++other) checkOffer(other);
      return true;
    }
    std::size_t budget = kReadBytesMax;
    while (pulled_ < size()) {
      const int source = (rank() + pulled_) % size();
      if (rooted_ && source != call_.root) {
        ++pulled_;
        continue;
      }
      if (done_ == 0) check(source);
      const Buffer& target = targetFrom(source);
      const std::size_t bytes = std::min(budget, target.bytes - done_);
      if (bytes > 0) fetch(source, static_cast<unsigned char*>(target.data) + done_, bytes);
      done_ += bytes;
      budget -= bytes;
      if (done_ < target.bytes) return false;
      done_ = 0;
      ++pulled_;
    }
    return true;
  }

  const Buffer& targetFrom(int source) const { return call_.outputs[rooted_ ? 0 : static_cast<std::size_t>(source)]; }

  void check(int source) {
    if (call_.kind == CollectiveKind::kAllGather || call_.kind == CollectiveKind::kAllToAll) {
      const Offer& theirs = group_.offer(sequence_, source);
      if (theirs.kind != static_cast<std::uint8_t>(call_.kind)) checkOffer(source);
    } else {
      checkOffer(source);
    }
    const std::size_t offered = group_.table(sequence_, source)[rank()].bytes;
    const std::size_t wanted = targetFrom(source).bytes;
    if (offered != wanted) {
      throw CollectiveMismatch("group rank " + std::to_string(source) + " gives " + std::to_string(offered) +
                               " bytes where this rank expects " + std::to_string(wanted) +
                               "; all ranks must call the same operation with matching sizes");
    }
  }

  void fetch(int source, unsigned char* to, std::size_t bytes) {
    const Piece& piece = group_.table(sequence_, source)[rank()];
    if (group_.offer(sequence_, source).in_place == 0) {
      if (piece.address + done_ + bytes > kSlotBytes)
        throw CollectiveMismatch("a peer's table points outside its slot");
      std::memcpy(to, group_.slot(sequence_, source) + piece.address + done_, bytes);
      if (source != rank()) group_.countFetched(bytes);
    } else if (source == rank()) {
      const Buffer& own = call_.inputs[call_.inputs.size() == 1 ? 0 : static_cast<std::size_t>(rank())];
      const unsigned char* from = static_cast<const unsigned char*>(own.data) + done_;
      if (from != to) std::memmove(to, from, bytes);
    } else {
      group_.read(source, piece.address + done_, to, bytes);
      group_.confirm(source);
    }
  }

  bool rooted_ = false, offers_ = false, pulls_ = false, in_place_ = false;
  At at_ = At::kStart;
  int pulled_ = 0;
  std::size_t done_ = 0;
};

}  // namespace

std::unique_ptr<FlatOperation> makePullOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence,
                                                 const CollectiveCall& call) {
  return std::make_unique<PullOperation>(engine, std::move(group), sequence, call);
}

}  // namespace trainmover::flat
