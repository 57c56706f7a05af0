// Memory that the ranks of one communicator share when they are all on one machine: who has arrived where, what each
// offers, and a staging area. Laid out here; used by flat/*.cc.
//
// Operations are numbered from 1 and alternate between two sides, so that a rank may begin the next one while others
// still read what it left in this one. A side is used again only when every rank has left the operation that used it
// last (`left`).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/schedule.h"

namespace trainmover::flat {

constexpr int kSides = 2;
constexpr int kStages = 3;
constexpr std::size_t kSlotBytes = std::size_t{1} << 20;  // staging of one rank on one side
constexpr int kRanksMax = 256;

/// What a rank has called and where its data lies. Written by its rank before it arrives, read by the others after.
struct Offer {
  std::atomic<std::uint64_t> sequence;  // stored last: the offer is whole
  std::uint64_t bytes;                  // of the whole vector, or of one piece where pieces are equal
  std::uint64_t address;                // of the data in that process, where it has one address
  std::uint64_t shape;                  // of pieces that differ in size: a hash that all ranks must share
  std::uint64_t in_place;               // 1: the pieces of its table lie in its process; 0: in its slot
  std::uint8_t kind, dtype, op;
  std::int16_t root;
};

struct alignas(128) RankLine {
  std::atomic<std::uint64_t> left;   // operations this rank has left
  std::atomic<std::uint64_t> valid;  // cleared when the rank gives up: what was read from its memory is void
  std::int64_t process;
  std::uint64_t probe_address, probe_value;  // for trying whether its memory can be read
  Offer offers[kSides];
};

struct Counter {
  alignas(64) std::atomic<std::uint64_t> arrivals;  // only grows
};

struct Header {
  std::atomic<std::uint32_t> attached;   // ranks that have mapped this and tried cross-memory reads
  std::atomic<std::uint32_t> described;  // ranks whose line is filled in
  std::atomic<std::uint32_t> cross_memory_denied;
  std::atomic<std::uint32_t> waits_for_left;  // somebody sleeps until a side is free
  Counter counters[kSides][kStages];
};

/// One entry of a rank's table: where in its process (or slot) the piece for one other rank lies.
struct Piece {
  std::uint64_t address;
  std::uint64_t bytes;
};

/// Offsets within the segment of a group of `size` ranks.
class Layout {
 public:
  explicit Layout(int size)
      : size_(static_cast<std::size_t>(size)),
        lines_(roundUp(sizeof(Header))),
        tables_(lines_ + roundUp(size_ * sizeof(RankLine))),
        slots_(tables_ + roundUp(kSides * size_ * size_ * sizeof(Piece))) {}
  std::size_t bytes() const { return slots_ + kSides * size_ * kSlotBytes; }
  std::size_t line(int rank) const { return lines_ + static_cast<std::size_t>(rank) * sizeof(RankLine); }
  std::size_t table(int side, int rank) const {
    return tables_ + (static_cast<std::size_t>(side) * size_ + static_cast<std::size_t>(rank)) * size_ * sizeof(Piece);
  }
  std::size_t slot(int side, int rank) const {
    return slots_ + (static_cast<std::size_t>(side) * size_ + static_cast<std::size_t>(rank)) * kSlotBytes;
  }

 private:
  static std::size_t roundUp(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  std::size_t size_, lines_, tables_, slots_;
};

}  // namespace trainmover::flat
