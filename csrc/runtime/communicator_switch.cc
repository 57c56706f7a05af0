// A communicator's part in a switch: what it has linked, whether that is idle, and swapping links for prepared ones.
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "runtime/communicator_impl.h"
#include "transport/link_closed.h"

namespace trainmover {

void CommunicatorImpl::makeChannel(int peer, Generation generation, std::unique_ptr<Link> link) {
  channels_[static_cast<std::size_t>(peer)] = std::make_unique<Channel>(
      std::move(link), peer, static_cast<std::uint32_t>(generation), traffic_,
      [this](FrameClass message_class, std::uint64_t key) { return takeAnySource(message_class, key); });
  linked_.push_back(peer);
}

void CommunicatorImpl::dropChannel(int peer) {
  channels_[static_cast<std::size_t>(peer)].reset();
  linked_.erase(std::remove(linked_.begin(), linked_.end(), peer), linked_.end());
  if (broken_.peer == peer) broken_ = {};  // an end that explains itself
}

Channel* CommunicatorImpl::channelTo(int global_rank) const {
  const int peer = groupRankOf(global_rank);
  return peer < 0 ? nullptr : channels_[static_cast<std::size_t>(peer)].get();
}

bool CommunicatorImpl::hasLinkTo(int global_rank) const { return channelTo(global_rank) != nullptr; }

bool CommunicatorImpl::sharesSegmentWith(int global_rank) const {
  return (group_ || segment_ || segment_asked_) && groupRankOf(global_rank) >= 0;
}

void CommunicatorImpl::addLinked(std::set<int>& global_ranks) const {
  for (const int peer : linked_) global_ranks.insert(config_.global_ranks[static_cast<std::size_t>(peer)]);
  if (!group_ && !segment_) return;
  for (const int other : config_.global_ranks) {
    if (other != config_.global_ranks[static_cast<std::size_t>(rank())]) global_ranks.insert(other);
  }
}

// A collective of a communicator that is linked to a rank that moves counts even if its turn has not come: it would
// begin with one process and end with another.
std::string CommunicatorImpl::busyWith(const std::map<int, Endpoint>& moved) const {
  for (const auto& [global_rank, endpoint] : moved) {
    const int peer = groupRankOf(global_rank);
    if (peer < 0) continue;
    const Channel* channel = channels_[static_cast<std::size_t>(peer)].get();
    const auto concerns = [&](const auto& operation) { return channel != nullptr || operation->waitsFor(peer); };
    const auto found = std::find_if(collectives_.begin(), collectives_.end(), concerns);
    if (found != collectives_.end()) return (*found)->description;
    for (const auto& message : messages_) {
      if (message->transfer().peer == peer) return message->description;
    }
    if (waiting_.count(peer) != 0 || (channel != nullptr && channel->outstanding() > 0)) {
      return "a message of group " + config_.name;
    }
  }
  return "";
}

std::string CommunicatorImpl::busy() const {
  if (!collectives_.empty()) return collectives_.front()->description;
  return messages_.empty() ? "" : messages_.front()->description;
}

bool CommunicatorImpl::hasUnsent() const {
  return std::any_of(linked_.begin(), linked_.end(),
                     [&](int peer) { return channels_[static_cast<std::size_t>(peer)]->hasOutgoing(); });
}

bool CommunicatorImpl::wouldBeLocal(const std::map<int, Endpoint>& moved, const std::string& machine_id) const {
  bool concerned = false;
  for (const int other : config_.global_ranks) {
    const auto found = moved.find(other);
    concerned |= found != moved.end();
    const bool here = found != moved.end() ? found->second.machine_id == machine_id : host_.links().sharesMemory(other);
    if (!here) return false;
  }
  return concerned && size() > 1;
}

std::vector<int> CommunicatorImpl::dropBrokenPrepared() {
  std::vector<int> broken;
  for (auto at = prepared_.begin(); at != prepared_.end();) {
    if (!at->second->isClosed()) {
      ++at;
      continue;
    }
    broken.push_back(config_.global_ranks[static_cast<std::size_t>(at->first)]);
    at = prepared_.erase(at);
  }
  return broken;
}

LinkTally CommunicatorImpl::commit(const std::map<int, Endpoint>& moved, Generation generation) {
  LinkTally tally;
  tally.name = config_.name;
  tally.kept = linked_.size();
  for (const auto& [global_rank, endpoint] : moved) {
    const int peer = groupRankOf(global_rank);
    if (peer < 0) continue;
    locality_ = Locality::kUnknown;
    left_since_ms_.erase(peer);
    const bool lived = channels_[static_cast<std::size_t>(peer)] != nullptr;
    if (lived) {
      dropChannel(peer);
      --tally.kept;
    }
    const auto prepared = prepared_.find(peer);
    if (prepared != prepared_.end()) {
      makeChannel(peer, generation, std::move(prepared->second));
      ++tally.replaced;
    } else if (lived) {
      ++tally.dropped;
    }
  }
  prepared_.clear();
  links_kept_ += tally.kept;
  links_replaced_ += tally.replaced;
  return tally;
}

int CommunicatorImpl::brokenPrepared() const {
  for (const auto& [peer, link] : prepared_) {
    if (link->isClosed()) return config_.global_ranks[static_cast<std::size_t>(peer)];
  }
  return -1;
}

void CommunicatorImpl::peerMoved(int global_rank) {
  if (linked_.empty() && !segment_asked_) locality_ = Locality::kUnknown;
  left_since_ms_.erase(groupRankOf(global_rank));
  const Channel* channel = channelTo(global_rank);
  if (channel == nullptr || channel->generation() == static_cast<std::uint32_t>(host_.pairGeneration(global_rank))) {
    return;
  }
  const int peer = groupRankOf(global_rank);
  const bool needed = channel->outstanding() > 0 || needs(peer, true);
  dropChannel(peer);
  if (needed) host_.failed(global_rank, "its slot changed hands while operations here needed it", true);
}

void CommunicatorImpl::take(const Place& place) {
  started_.store(place.started, std::memory_order_relaxed);
  messages_started_ = place.messages;
  scheduled_sequence_ = place.scheduled;
}

Place CommunicatorImpl::place() const {
  return {started_.load(std::memory_order_relaxed), messages_started_, scheduled_sequence_};
}

std::vector<int> CommunicatorImpl::dropClosed() {
  std::vector<int> closed;
  for (const int peer : std::vector<int>(linked_)) {
    if (!channels_[static_cast<std::size_t>(peer)]->link().isClosed()) continue;
    dropChannel(peer);
    closed.push_back(config_.global_ranks[static_cast<std::size_t>(peer)]);
  }
  return closed;
}

}  // namespace trainmover
