// How operations end before their time: errors, limits, aborts, closing.
#include <algorithm>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/communicator_impl.h"

namespace trainmover {
namespace {

constexpr int kRoundsOfClosing = 256;

}  // namespace

// Ends all operations with the exception under way: a channel does not tell which of them it concerns.
void CommunicatorImpl::failAll(const std::string& why) {
  std::vector<std::shared_ptr<PendingOperation>> all(collectives_.begin(), collectives_.end());
  all.insert(all.end(), messages_.begin(), messages_.end());
  dropLinks();
  dead_ = true;
  collectives_.clear();
  messages_.clear();
  for (const auto& operation : all) operation->end(std::current_exception());
  host_.failed(-1, why, false);
}

// Ends the collective whose turn it is with the exception under way. Links go first: memory that others may be reading
// must be known to be void before its owner gets it back.
void CommunicatorImpl::failFront(const std::shared_ptr<PendingOperation>& front, const std::string& why) {
  dropLinks();
  dead_ = true;
  collectives_.pop_front();
  front->end(std::current_exception());
  const int global_rank = config_.global_ranks[static_cast<std::size_t>(rank())];
  host_.failed(-1, front->description + " failed on global rank " + std::to_string(global_rank) + ": " + why, false);
}

void CommunicatorImpl::checkLimits(std::uint64_t now_ms) {
  if (dead_ || checkBroken(now_ms) || checkLeft(now_ms)) return;
  if (!collectives_.empty()) {
    const auto front = collectives_.front();
    try {
      front->inspect();
    } catch (const std::exception& error) {
      return failFront(front, error.what());
    }
  }
  const auto late = [&](const auto& operation) {
    return operation->deadline_ms != 0 && now_ms > operation->deadline_ms;
  };
  const auto expire = [&](auto& queue) {
    const auto found = std::find_if(queue.begin(), queue.end(), late);
    if (found == queue.end()) return false;
    const auto operation = *found;
    const std::string why =
        operation->description + " did not end within its time-out; waiting for global ranks" + waitedFor(*operation);
    dropLinks();
    dead_ = true;
    queue.erase(found);
    operation->end(std::make_exception_ptr(CollectiveTimeout(why)));
    host_.failed(-1, why, false);
    return true;
  };
  if (!expire(collectives_)) expire(messages_);
}

// An abort or farewell that explains a closed link comes on another connection, and may be a little later.
bool CommunicatorImpl::checkBroken(std::uint64_t now_ms) {
  if (broken_.since_ms == 0) return false;
  if (elapsedMs(broken_.since_ms, now_ms) > kBrokenLinkGraceMs) {
    // It stays broken until fail() drops the links, which must find out first who waited for that peer directly.
    host_.failed(broken_.peer >= 0 ? config_.global_ranks[static_cast<std::size_t>(broken_.peer)] : -1, broken_.why,
                 true);
  }
  return true;
}

// What a rank sent before it left may still be on its way, but not for ever.
bool CommunicatorImpl::checkLeft(std::uint64_t now_ms) {
  for (const auto& [peer, since_ms] : left_since_ms_) {
    if (elapsedMs(since_ms, now_ms) <= kFarewellGraceMs || !needs(peer, true)) continue;
    host_.failed(config_.global_ranks[static_cast<std::size_t>(peer)], "it left while operations still needed it",
                 true);
    return true;
  }
  return false;
}

std::string CommunicatorImpl::waitedFor(const PendingOperation& operation) const {
  std::string text;
  int named = 0;
  for (int other = 0; other < size() && named < 8; ++other) {
    if (other == rank() || !operation.waitsFor(other)) continue;
    text += " " + std::to_string(config_.global_ranks[static_cast<std::size_t>(other)]);
    ++named;
  }
  return text.empty() ? " (none: it is queued behind others)" : text;
}

void CommunicatorImpl::fail(const AbortCause& cause) {
  const int culprit = dead_ ? -1 : groupRankOf(cause.culprit);
  std::vector<std::pair<std::shared_ptr<PendingOperation>, bool>> all;
  for (auto& operation : collectives_) all.emplace_back(operation, culprit >= 0 && operation->waitsFor(culprit));
  for (auto& operation : messages_) all.emplace_back(operation, culprit >= 0 && operation->waitsFor(culprit));
  dropLinks();
  dead_ = false;
  collectives_.clear();
  messages_.clear();
  for (auto& [operation, direct] : all) {
    if (direct && cause.silent) {
      operation->end(std::make_exception_ptr(CollectiveTimeout(cause.why)));
    } else if (direct && cause.lost) {
      operation->end(std::make_exception_ptr(PeerLost(cause.culprit, cause.why)));
    } else {
      operation->end(std::make_exception_ptr(CollectiveAborted(cause.generation, cause.culprit, cause.why)));
    }
  }
}

void CommunicatorImpl::close() {
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    if (closed_) return;
    closed_ = true;
    for (int rounds = 0; rounds < kRoundsOfClosing && !dead_ && outstanding() && collectives_.empty(); ++rounds) {
      if (!advance()) break;  // what peers still wait for goes out, if there is room
    }
    fail({host_.currentGeneration(), -1, "communicator " + config_.name + " was closed", false, false});
  }
  engine_.settle();
  host_.closed(config_.id, config_.serial);
}

}  // namespace trainmover
