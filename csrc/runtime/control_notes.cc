// Notes on their way out: queued by any thread, sent over the live control channel by the control plane's own.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/control_limits.h"
#include "runtime/control_plane.h"

namespace trainmover {

void ControlPlane::sendNote(int peer, Generation generation, std::string payload) {
  {
    std::lock_guard<std::mutex> lock(notes_mutex_);
    auto& queue = notes_[peer];
    if (queue.size() >= kNotesToSendMax) {
      throw TransportError(std::to_string(kNotesToSendMax) + " notes wait to be sent to global rank " +
                           std::to_string(peer) + "; it takes none, or cannot be reached");
    }
    const auto endpoint = directory_.find(peer);
    queue.push_back({{peer, generation, std::move(payload)}, endpoint ? endpoint->incarnation : 0});
  }
  command([this, peer] { pumpNotes(peer); });
}

// Sends what waits, as long as the peer takes it; asks for a channel where there is none.
void ControlPlane::pumpNotes(int peer, std::size_t outgoing_bytes_max) {
  Session* session = controlOf(peer);
  for (;;) {
    Note note;
    {
      std::lock_guard<std::mutex> lock(notes_mutex_);
      const auto found = notes_.find(peer);
      if (found == notes_.end()) return;
      if (session == nullptr) break;
      if (session->outgoing.size() >= outgoing_bytes_max) return;
      note = std::move(found->second.front().note);
      found->second.pop_front();
      if (found->second.empty()) notes_.erase(found);
    }
    sendFrame(*session, FrameKind::kNote, generation_, note.generation, note.payload);
  }
  if (given_up_ != 0) return dropNotes(peer);
  Want& entry = wants_[{Purpose::kControl, 0, 0, peer}];
  if (entry.deadline_ms == 0) entry.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
}

// Notes for a process that is gone, or that holds its rank no more. Those for the process `but_for` stay.
void ControlPlane::dropNotes(int peer, std::uint64_t but_for) {
  std::lock_guard<std::mutex> lock(notes_mutex_);
  const auto found = notes_.find(peer);
  if (found == notes_.end()) return;
  auto& queue = found->second;
  queue.erase(std::remove_if(queue.begin(), queue.end(),
                             [&](const Unsent& unsent) { return but_for == 0 || unsent.incarnation != but_for; }),
              queue.end());
  if (queue.empty()) notes_.erase(found);
}

}  // namespace trainmover
