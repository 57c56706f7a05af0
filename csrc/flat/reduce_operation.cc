// All-reduce, reduce and reduce-scatter over a shared segment. Three paths with equal bits: short vectors are staged
// and every rank reduces all of them; medium ones are staged and each rank reduces its slice; long ones, where the
// kernel lets ranks read each other's memory, are not staged at all.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "collectives/reduction_order.h"
#include "flat/flat_operation.h"
#include "reduce/kernels.h"

namespace trainmover::flat {
namespace {

constexpr std::size_t kEveryoneBytesMax = std::size_t{32} << 10;  // vector times ranks: each rank reduces all
constexpr std::size_t kScratchBytes = std::size_t{512} << 10;     // other ranks' chunks: within a core's cache
constexpr std::size_t kChunkBytesMin = std::size_t{16} << 10;
constexpr std::size_t kChunkBytesMax = std::size_t{256} << 10;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kElementsRound = 16;
constexpr std::size_t kCopyBytesMax = std::size_t{4} << 20;  // at one go, under the lock

struct Part {
  std::size_t begin, count;  // elements
};

class ReduceOperation final : public FlatOperation {
 public:
  ReduceOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence, const CollectiveCall& call)
      : FlatOperation(engine, std::move(group), sequence, call), element_(elementBytes(call.dtype)) {
    const std::size_t ranks = static_cast<std::size_t>(size());
    if (call_.kind == CollectiveKind::kReduceScatter) {
      std::size_t begin = 0;
      for (const Buffer& piece : call_.inputs) {
        parts_.push_back({begin, piece.bytes / element_});
        begin += piece.bytes / element_;
      }
      count_ = begin;
    } else {
      if (call_.inputs.empty()) call_.inputs = call_.outputs;
      count_ = call_.inputs[0].bytes / element_;
      for (int owner = 0; owner < size(); ++owner) {
        const Slice slice = sliceOf(count_, size(), owner);
        parts_.push_back({slice.begin, slice.end - slice.begin});
      }
    }
    bytes_ = count_ * element_;
    order_ = call_.kind == CollectiveKind::kReduce ? ReductionOrder::kTree : reductionOrder(bytes_, size());
    for (const Part& part : parts_) longest_ = std::max(longest_, part.count);
    pointers_.resize(ranks);
  }

  std::size_t scratchBytes() const override { return scratch_ ? scratch_bytes_ : 0; }

 private:
  enum class Path { kEveryone, kStaged, kRead };
  enum class At { kStart, kStage, kReduce, kCollect, kFinish };

  Status step() override {
    if (at_ == At::kStart) return begin();
    switch (path_) {
      case Path::kEveryone:
        return stepEveryone();
      case Path::kStaged:
        return stepStaged();
      case Path::kRead:
        return stepRead();
    }
    return Status::kDone;
  }

  Status begin() {
    if (!group_.sideFree(sequence_)) return Status::kWaiting;
    const bool all_reduce = call_.kind == CollectiveKind::kAllReduce;
    if (bytes_ * static_cast<std::size_t>(size()) <= kEveryoneBytesMax) {
      path_ = Path::kEveryone;
    } else if (order_ == ReductionOrder::kRing && group_.crossMemory() && call_.kind != CollectiveKind::kReduce) {
      path_ = Path::kRead;
    } else {
      path_ = Path::kStaged;
    }
    makeOffer(bytes_, path_ == Path::kRead && all_reduce ? addressOf(call_.inputs[0].data) : 0, shapeOfPieces());
    if (path_ == Path::kEveryone) {
      group_.expect(sequence_, 0, size());
      copyInputs(0, count_, group_.slot(sequence_, rank()));
      group_.arrive(sequence_, 0);
    } else if (path_ == Path::kRead) {
      group_.countOffered(bytes_);
      for (int stage = 0; stage < kStages; ++stage) group_.expect(sequence_, stage, size());
      offerPieces();
      group_.arrive(sequence_, 0);
    } else {
      const std::size_t fit = kSlotBytes / 2 / static_cast<std::size_t>(size()) / element_;
      block_ = std::max(kElementsRound, fit / kElementsRound * kElementsRound);
      blocks_ = std::max<std::size_t>(1, (longest_ + block_ - 1) / block_);
      stageBlock();
    }
    at_ = At::kReduce;
    return stepAgain();
  }

  // All ranks must cut the vector alike. FNV-1a over the pieces' sizes.
  std::uint64_t shapeOfPieces() const {
    if (call_.kind != CollectiveKind::kReduceScatter) return 0;
    std::uint64_t hash = 14695981039346656037ull;
    for (const Part& part : parts_) hash = (hash ^ part.count) * 1099511628211ull;
    return hash;
  }

  Status stepAgain() {
    const Status status = step();
    return status == Status::kWaiting ? Status::kMoved : status;
  }

  // --- short: every rank reduces everything -------------------------------------------------------------------------
  Status stepEveryone() {
    if (!group_.arrived(sequence_, 0)) return Status::kWaiting;
    checkOffers();
    const bool scatter = call_.kind == CollectiveKind::kReduceScatter;
    const Part part = scatter ? parts_[static_cast<std::size_t>(rank())] : Part{0, count_};
    if (!call_.outputs.empty() && (call_.kind != CollectiveKind::kReduce || rank() == call_.root)) {
      group_.countFetched(part.count * element_ * static_cast<std::size_t>(size() - 1));
      for (int other = 0; other < size(); ++other) {
        pointers_[static_cast<std::size_t>(other)] = group_.slot(sequence_, other) + part.begin * element_;
      }
      reduceAll(order_, rank(), pointers_.data(), size(), call_.outputs[0].data, part.count, call_.dtype, call_.op);
    }
    group_.leave(sequence_);
    return Status::kDone;
  }

  // --- medium: staged in blocks; each rank reduces its part of a block ----------------------------------------------
  // A slot has two halves, used in turn: a half is written again only after all have arrived with the other one, so
  // they have left this one.
  unsigned char* staged(int of_rank, int part) {
    return group_.slot(sequence_, of_rank) + (now_ % 2) * (kSlotBytes / 2) +
           static_cast<std::size_t>(part) * block_ * element_;
  }
  Part blockOf(int part) const {
    const Part& whole = parts_[static_cast<std::size_t>(part)];
    const std::size_t skipped = std::min(whole.count, now_ * block_);
    return {whole.begin + skipped, std::min(block_, whole.count - skipped)};
  }

  void stageBlock() {
    group_.expect(sequence_, 0, size());
    group_.expect(sequence_, 1, size());
    for (int part = 0; part < size(); ++part) {
      const Part block = blockOf(part);
      copyInputs(block.begin, block.count, staged(rank(), part));
    }
    group_.arrive(sequence_, 0);
  }

  Status stepStaged() {
    if (at_ == At::kReduce) {
      if (!group_.arrived(sequence_, 0)) return Status::kWaiting;
      if (now_ == 0) checkOffers();
      reduceBlock();
      group_.arrive(sequence_, 1);
      at_ = At::kCollect;
      return stepAgain();
    }
    if (!group_.arrived(sequence_, 1)) return Status::kWaiting;
    collectBlock();
    if (++now_ < blocks_) {
      stageBlock();
      at_ = At::kReduce;
      return stepAgain();
    }
    group_.leave(sequence_);
    return Status::kDone;
  }

  void reduceBlock() {
    const Part block = blockOf(rank());
    if (block.count == 0) return;
    group_.countFetched(block.count * element_ * static_cast<std::size_t>(size() - 1));
    for (int other = 0; other < size(); ++other) pointers_[static_cast<std::size_t>(other)] = staged(other, rank());
    void* out = staged(rank(), rank());
    if (call_.kind == CollectiveKind::kReduceScatter) {
      out = bytesAt(call_.outputs[0].data, (block.begin - parts_[static_cast<std::size_t>(rank())].begin) * element_);
    }
    reduceAll(order_, rank(), pointers_.data(), size(), out, block.count, call_.dtype, call_.op);
  }

  void collectBlock() {
    if (call_.kind == CollectiveKind::kReduceScatter) return;
    if (call_.kind == CollectiveKind::kReduce && rank() != call_.root) return;
    for (int owner = 0; owner < size(); ++owner) {
      const Part block = blockOf(owner);
      if (block.count == 0) continue;
      if (owner != rank()) group_.countFetched(block.count * element_);
      std::memcpy(bytesAt(call_.outputs[0].data, block.begin * element_), staged(owner, owner), block.count * element_);
    }
  }

  // --- long: read from the other ranks' memory ----------------------------------------------------------------------
  void offerPieces() {
    Piece* table = group_.table(sequence_, rank());
    if (call_.kind == CollectiveKind::kReduceScatter) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        table[i] = {addressOf(call_.inputs[i].data), call_.inputs[i].bytes};
      }
    } else {
      table[0] = {addressOf(call_.outputs[0].data), bytes_};
    }
  }

  Status stepRead() {
    switch (at_) {
      case At::kReduce:
        if (!group_.arrived(sequence_, 0)) return Status::kWaiting;
        if (now_ == 0) checkOffers();
        if (!reduceChunk()) return Status::kMoved;
        now_ = 0;
        group_.arrive(sequence_, 1);
        at_ = call_.kind == CollectiveKind::kReduceScatter ? At::kFinish : At::kCollect;
        if (at_ == At::kFinish) group_.arrive(sequence_, 2);
        return stepAgain();
      case At::kCollect:
        if (!group_.arrived(sequence_, 1)) return Status::kWaiting;
        if (!collectChunk()) return Status::kMoved;
        group_.arrive(sequence_, 2);
        at_ = At::kFinish;
        return stepAgain();
      default:
        if (!group_.arrived(sequence_, 2)) return Status::kWaiting;
        group_.leave(sequence_);
        return Status::kDone;
    }
  }

  // Reduces the next chunk of this rank's part; true after the last.
  bool reduceChunk() {
    const Part part = parts_[static_cast<std::size_t>(rank())];
    const bool scatter = call_.kind == CollectiveKind::kReduceScatter;
    const std::size_t others = static_cast<std::size_t>(size() - 1);
    const std::size_t chunk_bytes = std::clamp(kScratchBytes / others, kChunkBytesMin, kChunkBytesMax) / kPage * kPage;
    const std::size_t chunk = chunk_bytes / element_;
    if (!scratch_) scratch_.reset(new unsigned char[scratch_bytes_ = chunk_bytes * others]);
    const std::size_t count = std::min(chunk, part.count - std::min(part.count, now_));
    if (count > 0) {
      unsigned char* free = scratch_.get();
      for (int i = 1; i < size(); ++i) {
        const int other = (rank() + i) % size();
        const std::uint64_t base = scatter ? group_.table(sequence_, other)[rank()].address
                                           : group_.offer(sequence_, other).address + part.begin * element_;
        group_.read(other, base + now_ * element_, free, count * element_);
        pointers_[static_cast<std::size_t>(other)] = free;
        free += chunk_bytes;
      }
      const std::size_t own = scatter ? now_ : part.begin + now_;
      const void* source = call_.inputs[scatter ? static_cast<std::size_t>(rank()) : 0].data;
      pointers_[static_cast<std::size_t>(rank())] = bytesAt(const_cast<void*>(source), own * element_);
      reduceAll(order_, rank(), pointers_.data(), size(), bytesAt(call_.outputs[0].data, own * element_), count,
                call_.dtype, call_.op);
      now_ += count;
    }
    if (now_ < part.count) return false;
    confirmAll();
    return true;
  }

  // Fetches more of the other ranks' reduced parts; true after the last.
  bool collectChunk() {
    std::size_t budget = kCopyBytesMax;
    while (collected_ < size() - 1) {
      const int owner = (rank() + 1 + collected_) % size();
      const Part part = parts_[static_cast<std::size_t>(owner)];
      const std::size_t bytes = std::min(budget, (part.count - now_) * element_);
      if (bytes > 0) {
        const std::size_t offset = (part.begin + now_) * element_;
        group_.read(owner, group_.table(sequence_, owner)[0].address + offset, bytesAt(call_.outputs[0].data, offset),
                    bytes);
        now_ += bytes / element_;
        budget -= bytes;
      }
      if (now_ < part.count) return false;
      now_ = 0;
      ++collected_;
    }
    confirmAll();
    return true;
  }

  // --- shared -------------------------------------------------------------------------------------------------------
  static std::uint64_t addressOf(const void* data) { return reinterpret_cast<std::uint64_t>(data); }
  static unsigned char* bytesAt(void* data, std::size_t offset) { return static_cast<unsigned char*>(data) + offset; }

  // Copies elements [begin, begin + count) of the whole input, wherever its pieces lie.
  void copyInputs(std::size_t begin, std::size_t count, unsigned char* to) {
    if (count == 0) return;
    group_.countOffered(count * element_);
    if (call_.kind != CollectiveKind::kReduceScatter) {
      std::memcpy(to, bytesAt(call_.inputs[0].data, begin * element_), count * element_);
      return;
    }
    for (std::size_t i = 0; i < parts_.size() && count > 0; ++i) {
      const Part& part = parts_[i];
      if (begin >= part.begin + part.count) continue;
      const std::size_t here = std::min(count, part.begin + part.count - begin);
      std::memcpy(to, bytesAt(call_.inputs[i].data, (begin - part.begin) * element_), here * element_);
      to += here * element_;
      begin += here;
      count -= here;
    }
  }

  void checkOffers() const {
    for (int other = 0; other < size(); ++other) checkOffer(other);
  }
  void confirmAll() {
    for (int other = 0; other < size(); ++other) group_.confirm(other);
  }

  const std::size_t element_;
  std::vector<Part> parts_;
  std::size_t count_ = 0, bytes_ = 0, longest_ = 0;
  ReductionOrder order_ = ReductionOrder::kTree;
  Path path_ = Path::kEveryone;
  At at_ = At::kStart;
  std::size_t block_ = 0, blocks_ = 0, now_ = 0;
  int collected_ = 0;
  std::vector<const void*> pointers_;
  std::unique_ptr<unsigned char[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace

std::unique_ptr<FlatOperation> makeReduceOperation(Engine& engine, std::shared_ptr<Group> group, std::uint64_t sequence,
                                                   const CollectiveCall& call) {
  return std::make_unique<ReduceOperation>(engine, std::move(group), sequence, call);
}

}  // namespace trainmover::flat
