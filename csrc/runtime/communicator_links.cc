// What a communicator does about its links: asks for them at first use, hands transfers to them, drops them.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/communicator_impl.h"
#include "transport/link_closed.h"

namespace trainmover {
namespace {

constexpr int kRoundsOfFarewell = 4096;

}  // namespace

void CommunicatorImpl::submit(Transfer& transfer) {
  Channel* channel = channels_[static_cast<std::size_t>(transfer.peer)].get();
  if (channel != nullptr) {
    transfer.is_send ? channel->send(transfer) : channel->receive(transfer);
    return;
  }
  auto& waiting = waiting_[transfer.peer];
  if (waiting.empty()) {
    const int global_rank = config_.global_ranks[static_cast<std::size_t>(transfer.peer)];
    if (!host_.links().knows(global_rank)) {
      throw TransportError("no endpoint is known for global rank " + std::to_string(global_rank) +
                           "; it has to be made known (add_endpoints) before the first operation that needs it");
    }
    host_.links().wantLink(config_.id, host_.currentGeneration(), global_rank);
  }
  waiting.push_back(&transfer);
}

void CommunicatorImpl::submitAnySource(Transfer& transfer) {
  for (const int peer : linked_) {
    if (channels_[static_cast<std::size_t>(peer)]->tryReceive(transfer)) return;
  }
  any_source_.push_back(&transfer);
}

Transfer* CommunicatorImpl::takeAnySource(FrameClass, std::uint64_t key) {
  const auto found = std::find_if(any_source_.begin(), any_source_.end(),
                                  [&](const Transfer* transfer) { return transfer->key == key; });
  if (found == any_source_.end()) return nullptr;
  Transfer* transfer = *found;
  any_source_.erase(found);
  return transfer;
}

bool CommunicatorImpl::advanceChannels() {
  bool moved = false;
  for (std::size_t i = 0; i < linked_.size(); ++i) {
    const int peer = linked_[i];
    Channel& channel = *channels_[static_cast<std::size_t>(peer)];
    if (channel.ended() || (!channel.busy() && any_source_.empty())) continue;
    try {
      moved |= channel.progress();
    } catch (const LinkClosed& error) {
      linkBroke(peer, error.what());
      return true;
    }
  }
  return moved;
}

void CommunicatorImpl::linkBroke(int peer, const std::string& why) {
  if (broken_.since_ms == 0) broken_ = {peer, monotonicMs(), why};
}

bool CommunicatorImpl::waitsForSockets() const {
  return std::any_of(linked_.begin(), linked_.end(), [&](int peer) {
    const Channel& channel = *channels_[static_cast<std::size_t>(peer)];
    return channel.link().descriptor() >= 0 && !channel.ended() && (channel.busy() || !any_source_.empty());
  });
}

void CommunicatorImpl::linkReady(Generation generation, int global_rank, std::unique_ptr<Link> link) {
  const int peer = groupRankOf(global_rank);
  if (closed_ || peer < 0 || engine_.isAborted()) return;
  const bool prepared = host_.prepares(generation, global_rank);
  if (!prepared && generation != host_.pairGeneration(global_rank)) {
    // The slot changed hands while the link was on its way.
    if (waiting_.count(peer) != 0) host_.links().wantLink(config_.id, host_.currentGeneration(), global_rank);
    return;
  }
  if (const Channel* present = channels_[static_cast<std::size_t>(peer)].get(); present != nullptr && !prepared) {
    // One of an older generation is of a process that is gone, which this rank may hear only now.
    if (present->generation() == static_cast<std::uint32_t>(generation) || present->outstanding() > 0) return;
    dropChannel(peer);
  }
  if (link->descriptor() >= 0) engine_.addSocket(link->descriptor());
  if (prepared) {
    prepared_[peer] = std::move(link);
    return host_.linkPrepared(config_.id, global_rank);
  }
  makeChannel(peer, generation, std::move(link));
  const auto waiting = waiting_.find(peer);
  if (waiting == waiting_.end()) return;
  const std::vector<Transfer*> transfers = std::move(waiting->second);
  waiting_.erase(waiting);
  try {
    for (Transfer* transfer : transfers) submit(*transfer);
  } catch (const LinkClosed& error) {
    linkBroke(peer, error.what());
  } catch (const CollectiveError& error) {
    failAll(error.what());
  } catch (const std::exception& error) {
    host_.failed(-1, error.what(), false);
  }
}

void CommunicatorImpl::segmentReady(Generation generation, Mapping segment) {
  if (closed_ || engine_.isAborted() || segment_ || group_) return;
  if (generation != host_.pairGeneration(config_.global_ranks[0])) return;
  segment_ = std::move(segment);
}

bool CommunicatorImpl::allLocal() {
  if (locality_ == Locality::kUnknown) {
    const auto shares = [&](int global_rank) {
      if (!host_.links().knows(global_rank)) {
        throw TransportError("no endpoint is known for global rank " + std::to_string(global_rank) +
                             "; it has to be made known (add_endpoints) before the first operation that needs it");
      }
      return host_.links().sharesMemory(global_rank);
    };
    const bool all = std::all_of(config_.global_ranks.begin(), config_.global_ranks.end(), shares);
    locality_ = all ? Locality::kLocal : Locality::kSpread;
  }
  return locality_ == Locality::kLocal;
}

// The segment is made by group rank 0 and handed out by its control plane; every rank also needs the others' doorbells.
bool CommunicatorImpl::groupReady() {
  if (group_joined_) return true;
  const Generation generation = host_.currentGeneration();
  const flat::Layout layout(size());
  LinkSource& links = host_.links();
  if (!segment_asked_) {
    segment_asked_ = true;
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) links.wantControl(config_.global_ranks[static_cast<std::size_t>(other)]);
    }
    if (rank() == 0) {
      Descriptor memory;
      segment_ = Mapping::create("trainmover-group", layout.bytes(), memory);
      links.offerSegment(config_.id, generation, std::move(memory));
    } else {
      links.wantSegment(config_.id, generation, config_.global_ranks[0], layout.bytes());
    }
  }
  if (!group_) {
    if (!segment_) return false;
    flat::GroupConfig config{size(), rank(), links.crossMemoryAllowed(), {}};
    for (int other = 0; other < size(); ++other) {
      auto doorbell =
          other == rank() ? nullptr : links.doorbellOf(config_.global_ranks[static_cast<std::size_t>(other)]);
      if (other != rank() && !doorbell) return false;
      config.doorbells.push_back(std::move(doorbell));
    }
    group_ = std::make_shared<flat::Group>(std::move(segment_), std::move(config), traffic_);
    segment_ = Mapping();
  }
  group_joined_ = group_->join();
  return group_joined_;
}

// Links go before the operations that use them: closing one tells the peer that memory it read may be anything.
void CommunicatorImpl::dropLinks() {
  waiting_.clear();
  any_source_.clear();
  for (auto& channel : channels_) channel.reset();
  linked_.clear();
  prepared_.clear();
  broken_ = {};
  if (group_) group_->withdraw();
  group_.reset();
  segment_ = Mapping();
  group_joined_ = segment_asked_ = false;
}

// What it sent before it left still counts. Its links tell their end themselves; its memory is gone now.
void CommunicatorImpl::peerLeft(int global_rank) {
  const int peer = groupRankOf(global_rank);
  if (peer < 0 || closed_ || dead_) return;
  left_since_ms_[peer] = monotonicMs();
  for (int rounds = 0; rounds < kRoundsOfFarewell && outstanding() && advance(); ++rounds) {
  }
  if (!dead_ && needs(peer, false)) host_.failed(global_rank, "it left while operations still needed it", true);
}

// True when something outstanding cannot end without group rank `peer`: its memory, a link that is not there yet, or,
// where asked for, anything at all.
bool CommunicatorImpl::needs(int peer, bool also_links) const {
  if (waiting_.count(peer) != 0) return true;
  const auto waits = [&](const auto& operation) {
    return operation->needsMemoryOf(peer) || (also_links && operation->waitsFor(peer));
  };
  return (!collectives_.empty() && waits(collectives_.front())) ||
         std::any_of(messages_.begin(), messages_.end(),
                     [&](const auto& message) { return message->transfer().peer == peer && waits(message); });
}

int CommunicatorImpl::groupRankOf(int global_rank) const {
  const auto found = group_ranks_.find(global_rank);
  return found == group_ranks_.end() ? -1 : found->second;
}

void CommunicatorImpl::addMemory(MemoryStats& stats) const {
  for (const int peer : linked_) {
    const Channel& channel = *channels_[static_cast<std::size_t>(peer)];
    (channel.link().descriptor() >= 0 ? stats.link_buffers : stats.shared_segments) += channel.link().heldBytes();
    stats.unexpected_messages += channel.unexpectedBytes();
  }
  for (const auto& [peer, link] : prepared_) {
    (link->descriptor() >= 0 ? stats.link_buffers : stats.shared_segments) += link->heldBytes();
  }
  for (const auto& operation : collectives_) stats.scratch += operation->scratchBytes();
  if (group_ || segment_) stats.shared_segments += flat::Layout(size()).bytes();
}

CommunicatorStats CommunicatorImpl::stats() const {
  std::lock_guard<std::mutex> lock(engine_.mutex());
  CommunicatorStats stats;
  stats.name = config_.name;
  stats.size = size();
  stats.rank = rank();
  stats.operations = started_.load(std::memory_order_relaxed) + messages_started_;
  stats.links = linked_.size();
  stats.links_kept = links_kept_;
  stats.links_replaced = links_replaced_;
  stats.bytes_sent = traffic_.bytes_sent;
  stats.bytes_received = traffic_.bytes_received;
  stats.waits = waits_->waits.load(std::memory_order_relaxed);
  stats.sleeps = waits_->sleeps.load(std::memory_order_relaxed);
  stats.wait_us = waits_->wait_ns.load(std::memory_order_relaxed) / 1000;
  return stats;
}

}  // namespace trainmover
