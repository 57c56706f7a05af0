// The shared segment of a communicator as one rank uses it: joining, arriving, waiting, reading others' memory. Called
// by the operations in flat/*_operation.cc, under the engine's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/mapping.h"
#include "collectives/schedule.h"
#include "flat/segment.h"
#include "runtime/doorbell.h"
#include "runtime/traffic.h"

namespace trainmover::flat {

struct GroupConfig {
  int size = 1;
  int rank = 0;
  bool cross_memory_allowed = true;
  std::vector<std::shared_ptr<PeerDoorbell>> doorbells;  // by group rank; own: null
};

class Group {
 public:
  /// Counts in `traffic`, which its user keeps for as long as it calls.
  Group(Mapping segment, GroupConfig config, Traffic& traffic);

  /// Tells the others that what this rank offers may be anything from now on. Before its callers get their memory back.
  void withdraw();

  /// Fills in this rank's line and tries the others'; true once all ranks have done so.
  bool join();
  /// All ranks may read each other's memory. Valid after join().
  bool crossMemory() const { return cross_memory_; }

  int size() const { return config_.size; }
  int rank() const { return config_.rank; }
  /// True when no rank is still in the operation that used the side of operation `sequence` last.
  bool sideFree(std::uint64_t sequence);
  Offer& offer(std::uint64_t sequence, int rank) { return line(rank).offers[sequence % kSides]; }
  Piece* table(std::uint64_t sequence, int rank) { return at<Piece>(layout_.table(side(sequence), rank)); }
  unsigned char* slot(std::uint64_t sequence, int rank) {
    return at<unsigned char>(layout_.slot(side(sequence), rank));
  }

  /// `stage` of operation `sequence` will see `arrivals` more. Every rank calls it, in the same order.
  void expect(std::uint64_t sequence, int stage, int arrivals);
  /// The last to arrive wakes the others.
  void arrive(std::uint64_t sequence, int stage);
  bool arrived(std::uint64_t sequence, int stage) const;
  /// Wakes the others: an offer is there that they may wait for.
  void announceOffer() { ringAll(); }
  bool hasLeft(int rank, std::uint64_t sequence) const {
    return line(rank).left.load(std::memory_order_seq_cst) >= sequence;
  }
  /// This rank needs nothing of operation `sequence` any more.
  void leave(std::uint64_t sequence);

  /// Counts what was put up for others, or fetched from them by other means than read().
  void countOffered(std::size_t bytes) { traffic_.bytes_sent += bytes; }
  void countFetched(std::size_t bytes) { traffic_.bytes_received += bytes; }
  /// Copies from the memory of `rank`. Throws LinkClosed when it is gone or taken back.
  void read(int rank, std::uint64_t address, void* to, std::size_t bytes);
  /// After the last read(): throws LinkClosed unless what was read is sure to be what `rank` offered.
  void confirm(int rank);

 private:
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(segment_.data()) + offset);
  }
  static int side(std::uint64_t sequence) { return static_cast<int>(sequence % kSides); }
  RankLine& line(int rank) const { return *at<RankLine>(layout_.line(rank)); }
  Header& header() const { return *at<Header>(0); }
  void ringAll();
  bool allLeft(std::uint64_t sequence);

  Mapping segment_;
  GroupConfig config_;
  Traffic& traffic_;
  Layout layout_;
  std::uint64_t probe_;
  bool described_ = false, attached_ = false, cross_memory_ = false;
  std::uint64_t left_by_all_ = 0;
  std::uint64_t expected_[kSides][kStages] = {};
};

}  // namespace trainmover::flat
