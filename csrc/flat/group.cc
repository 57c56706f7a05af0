#include "flat/group.h"

#include <unistd.h>

#include <utility>

#include "base/clock.h"
#include "transport/link_closed.h"
#include "transport/shm/link.h"

namespace trainmover::flat {

Group::Group(Mapping segment, GroupConfig config, Traffic& traffic)
    : segment_(std::move(segment)),
      config_(std::move(config)),
      traffic_(traffic),
      layout_(config_.size),
      probe_(monotonicNs()) {}

void Group::withdraw() {
  line(config_.rank).valid.store(0, std::memory_order_seq_cst);
  ringAll();
}

bool Group::join() {
  const auto all = static_cast<std::uint32_t>(config_.size);
  if (!described_) {
    RankLine& mine = line(config_.rank);
    mine.process = ::getpid();
    mine.probe_address = reinterpret_cast<std::uint64_t>(&probe_);
    mine.probe_value = probe_;
    mine.valid.store(1, std::memory_order_seq_cst);
    described_ = true;
    if (header().described.fetch_add(1, std::memory_order_acq_rel) + 1 == all) ringAll();
  }
  if (!attached_) {
    if (header().described.load(std::memory_order_acquire) < all) return false;
    bool allowed = config_.cross_memory_allowed;
    for (int rank = 0; rank < config_.size && allowed; ++rank) {
      const RankLine& other = line(rank);
      allowed = rank == config_.rank || shm::mayReadMemoryOf(other.process, other.probe_address, other.probe_value);
    }
    if (!allowed) header().cross_memory_denied.fetch_add(1, std::memory_order_acq_rel);
    attached_ = true;
    if (header().attached.fetch_add(1, std::memory_order_acq_rel) + 1 == all) ringAll();
  }
  if (header().attached.load(std::memory_order_acquire) < all) return false;
  cross_memory_ = header().cross_memory_denied.load(std::memory_order_acquire) == 0;
  return true;
}

bool Group::sideFree(std::uint64_t sequence) {
  if (sequence <= kSides || left_by_all_ + kSides >= sequence) return true;
  if (allLeft(sequence - kSides)) return true;
  // Ask to be woken, then look once more: one of the two sees the other.
  header().waits_for_left.store(1, std::memory_order_seq_cst);
  return allLeft(sequence - kSides);
}

bool Group::allLeft(std::uint64_t sequence) {
  for (int rank = 0; rank < config_.size; ++rank) {
    if (line(rank).left.load(std::memory_order_seq_cst) < sequence) return false;
  }
  left_by_all_ = sequence;
  return true;
}

void Group::expect(std::uint64_t sequence, int stage, int arrivals) {
  expected_[side(sequence)][stage] += static_cast<std::uint64_t>(arrivals);
}

void Group::arrive(std::uint64_t sequence, int stage) {
  auto& arrivals = header().counters[side(sequence)][stage].arrivals;
  if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == expected_[side(sequence)][stage]) ringAll();
}

bool Group::arrived(std::uint64_t sequence, int stage) const {
  return header().counters[side(sequence)][stage].arrivals.load(std::memory_order_acquire) >=
         expected_[side(sequence)][stage];
}

void Group::leave(std::uint64_t sequence) {
  line(config_.rank).left.store(sequence, std::memory_order_seq_cst);
  if (header().waits_for_left.load(std::memory_order_seq_cst) != 0) {
    header().waits_for_left.store(0, std::memory_order_seq_cst);
    ringAll();
  }
}

void Group::read(int rank, std::uint64_t address, void* to, std::size_t bytes) {
  if (!shm::readMemoryOf(line(rank).process, address, to, bytes)) {
    throw RankClosed(rank, "its memory cannot be read any more");
  }
  countFetched(bytes);
}

void Group::confirm(int rank) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (line(rank).valid.load(std::memory_order_seq_cst) == 0) throw RankClosed(rank, "took its memory back");
}

void Group::ringAll() {
  for (auto& doorbell : config_.doorbells) {
    if (doorbell) doorbell->ring();
  }
}

}  // namespace trainmover::flat
