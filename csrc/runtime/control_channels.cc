// Established control channels: heartbeats, aborts, farewells, and what the end of one means.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "runtime/control_limits.h"
#include "runtime/control_plane.h"
#include "runtime/sockets.h"

namespace trainmover {
namespace {

// In the key of an abort, above the culprit's rank.
constexpr std::uint64_t kLostBit = std::uint64_t{1} << 32;
constexpr std::uint64_t kSilentBit = std::uint64_t{1} << 33;

}  // namespace

void ControlPlane::controlUp(Session& session) {
  const int peer = session.key.peer;
  if (session.local) {
    try {
      auto doorbell = std::make_shared<PeerDoorbell>(session.received[0], std::move(session.received[1]));
      std::lock_guard<std::mutex> lock(doorbells_mutex_);
      (isPlanned(session.key) ? plan_.doorbells : doorbells_)[peer] = std::move(doorbell);
    } catch (const std::exception& error) {
      log_.warn(config_.global_rank, error.what());
      return drop(session.id);
    }
  }
  session.received.clear();
  session.state = SessionState::kControl;
  session.deadline_ms = 0;
  session.last_heard_ms = session.last_sent_ms = monotonicMs();
  endWant(session.key);
  if (isPlanned(session.key)) return listener_.channelPrepared(plan_.generation, peer);
  if (last_abort_ && last_abort_->generation == generation_) {
    sendAbort(session, *last_abort_);
  }
  pumpNotes(peer);
  listener_.deliver([] {});  // whoever waits for the doorbell looks again
}

// A control channel whose handshake is over becomes the one to its peer, unless there is one.
void ControlPlane::takeControl(Session& session) {
  if (isControlTaken(session.key)) return drop(session.id);
  (isPlanned(session.key) ? plan_.controls : controls_)[session.key.peer] = session.id;
  controlUp(session);
}

bool ControlPlane::isControlTaken(const Key& key) const {
  return (isPlanned(key) ? plan_.controls : controls_).count(key.peer) != 0;
}

// The live one; none while it is still that of a process which has been replaced.
Session* ControlPlane::controlOf(int peer) {
  const auto found = controls_.find(peer);
  if (found == controls_.end()) return nullptr;
  Session& session = *sessions_.at(found->second);
  return session.state == SessionState::kControl && !isReplaced(session) ? &session : nullptr;
}

Session* ControlPlane::controlFor(const Key& key) {
  if (!isPlanned(key)) return controlOf(key.peer);
  const auto found = plan_.controls.find(key.peer);
  return found == plan_.controls.end() ? nullptr : sessions_.at(found->second).get();
}

// To the caller a control channel is up once it has been welcomed, which is a little earlier than here.
bool ControlPlane::mayTakeFrames(const Session& session) const {
  const bool welcomed = session.state == SessionState::kPassing && session.key.purpose == Purpose::kControl;
  return session.state == SessionState::kControl || welcomed;
}

void ControlPlane::serveControl(Session& session) {
  std::uint8_t bytes[16384];
  std::vector<Descriptor> none;
  const long got = receiveWith(session.socket.get(), bytes, sizeof bytes, none, 0);
  if (got < 0) return lostSession(session, "its process ended", false);
  if (got == 0) return;
  session.last_heard_ms = monotonicMs();
  session.incoming.insert(session.incoming.end(), bytes, bytes + got);
  takeControlFrames(session);
}

// A joiner may be live, and speak, before this rank has committed: what it says is heard then.
bool ControlPlane::isForLater(const Session& session, const FrameHeader& header) const {
  const bool ends = header.kind == FrameKind::kGoodbye || header.kind == FrameKind::kMoved;
  return isPlanned(session.key) && header.kind != FrameKind::kHeartbeat && !ends;
}

void ControlPlane::takeControlFrames(Session& session) {
  const std::uint64_t id = session.id;
  try {
    while (session.incoming.size() >= kFrameHeaderBytes) {
      const FrameHeader header = decode(session.incoming.data());
      const bool has_payload = header.kind == FrameKind::kAbort || header.kind == FrameKind::kNote;
      const std::size_t total = kFrameHeaderBytes + (has_payload ? header.bytes : 0);
      if (isForLater(session, header)) {
        if (session.incoming.size() > kIncomingBytesMax) throw FrameError("too much before it was committed");
        return;
      }
      if (session.incoming.size() < total) return;
      const std::string reason(session.incoming.begin() + kFrameHeaderBytes,
                               session.incoming.begin() + static_cast<std::ptrdiff_t>(total));
      session.incoming.erase(session.incoming.begin(), session.incoming.begin() + static_cast<std::ptrdiff_t>(total));
      takeControlFrame(session, header, reason);
      if (sessions_.count(id) == 0) return;
    }
  } catch (const FrameError& error) {
    lostSession(session, std::string("it sent what cannot be understood: ") + error.what(), false);
  }
}

void ControlPlane::takeControlFrame(Session& session, const FrameHeader& header, const std::string& reason) {
  const int peer = session.key.peer;
  if (header.kind != FrameKind::kHeartbeat) received_.fetch_add(1, std::memory_order_relaxed);
  if (isPlanned(session.key) && header.kind != FrameKind::kHeartbeat) return lostSession(session, "it left", false);
  switch (header.kind) {
    case FrameKind::kHeartbeat:
      return;
    case FrameKind::kAbort: {
      AbortCause cause;
      cause.culprit = static_cast<std::int32_t>(static_cast<std::uint32_t>(header.key));
      cause.why = reason;
      cause.lost = (header.key & kLostBit) != 0;
      cause.silent = (header.key & kSilentBit) != 0;
      // Its end will be read here too, perhaps in a generation that knows of it already.
      const bool is_over = cause.lost && !cause.silent && cause.culprit != peer;
      if (is_over && header.generation == static_cast<std::uint32_t>(listener_.presentGeneration())) {
        forget(cause.culprit);
      }
      return listener_.abortHeard(header.generation, cause);
    }
    case FrameKind::kGoodbye:
      if (isReplaced(session)) return drop(session.id);
      left_[peer] = session.peer_incarnation;
      forget(peer);
      return listener_.peerLeft(peer);
    case FrameKind::kMoved: {
      // Its rank or ours has changed hands: nothing more will come here, and that is nobody's death.
      if (!isReplaced(session)) {
        moved_[peer] = session.peer_incarnation;
        dropNotes(peer);
      }
      drop(session.id);
      std::lock_guard<std::mutex> lock(doorbells_mutex_);
      doorbells_.erase(peer);
      return;
    }
    case FrameKind::kNote:
      if (isReplaced(session) || listener_.noteCame({peer, header.key, reason})) return;
      return lostSession(session, "it sent more notes than are kept here (" + std::to_string(kNotesReceivedMax) + ")",
                         false);
    default:
      throw FrameError("a frame that belongs on a link came over a control channel");
  }
}

void ControlPlane::sendFrame(Session& session, FrameKind kind, Generation generation, std::uint64_t key,
                             const std::string& reason) {
  FrameHeader header;
  header.kind = kind;
  header.generation = static_cast<std::uint32_t>(generation);
  header.key = key;
  const std::string text = kind == FrameKind::kNote ? reason : reason.substr(0, kAbortReasonBytesMax);
  header.bytes = text.size();
  const auto encoded = encode(header);
  std::vector<std::uint8_t> message(encoded.begin(), encoded.end());
  message.insert(message.end(), text.begin(), text.end());
  if (kind != FrameKind::kHeartbeat) sent_.fetch_add(1, std::memory_order_relaxed);
  transmit(session, message.data(), message.size());
}

// What the socket does not take waits. Much waits only when the peer has been silent for long, which heartbeats find
// out.
void ControlPlane::transmit(Session& session, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  session.outgoing.insert(session.outgoing.end(), from, from + bytes);
  if (!flush(session)) watch(session, true);
}

bool ControlPlane::flush(Session& session) {
  std::size_t sent = 0;
  while (sent < session.outgoing.size()) {
    const ssize_t now = ::send(session.socket.get(), session.outgoing.data() + sent, session.outgoing.size() - sent,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) break;
    sent += static_cast<std::size_t>(now);
  }
  if (sent > 0) session.last_sent_ms = monotonicMs();
  session.outgoing.erase(session.outgoing.begin(), session.outgoing.begin() + static_cast<std::ptrdiff_t>(sent));
  return session.outgoing.empty();
}

void ControlPlane::tellAbort(const AbortCause& cause) {
  command([this, cause] {
    last_abort_ = cause;
    for (const auto& [peer, id] : controls_) {
      Session& session = *sessions_.at(id);
      if (session.state == SessionState::kControl) sendAbort(session, cause);
    }
  });
}

void ControlPlane::sendAbort(Session& session, const AbortCause& cause) {
  const std::uint64_t key =
      static_cast<std::uint32_t>(cause.culprit) | (cause.lost ? kLostBit : 0) | (cause.silent ? kSilentBit : 0);
  sendFrame(session, FrameKind::kAbort, cause.generation, key, cause.why);
}

void ControlPlane::heartbeats(std::uint64_t now_ms) {
  const std::uint64_t limit_ms = config_.settings.peer_timeout_ms;
  // A process that was stopped has heard nobody meanwhile: that says nothing about them.
  const bool was_stopped = last_tick_ms_ != 0 && elapsedMs(last_tick_ms_, now_ms) > limit_ms / 2;
  last_tick_ms_ = now_ms;
  std::vector<std::uint64_t> silent;
  for (const auto& [id, entry] : sessions_) {
    Session& session = *entry;
    if (session.state != SessionState::kControl) continue;
    if (was_stopped) session.last_heard_ms = now_ms;
    if (elapsedMs(session.last_heard_ms, now_ms) > limit_ms) {
      silent.push_back(id);
    } else if (session.outgoing.empty() && elapsedMs(session.last_sent_ms, now_ms) > limit_ms / kHeartbeatsPerTimeout) {
      sendFrame(session, FrameKind::kHeartbeat, generation_, 0, "");
    }
  }
  for (const std::uint64_t id : silent) {
    if (sessions_.count(id) == 0) continue;
    const int peer = sessions_.at(id)->key.peer;
    lostSession(*sessions_.at(id),
                "global rank " + std::to_string(peer) + " gave no sign of life for " + std::to_string(limit_ms) +
                    " ms (TRAINMOVER_PEER_TIMEOUT_MS): its process is stopped, or the link to it is cut",
                true);
  }
}

// Another process holds its rank by now: what becomes of this one concerns nobody.
bool ControlPlane::isReplaced(const Session& session) const {
  const auto endpoint = directory_.find(session.key.peer);
  return endpoint && endpoint->incarnation != session.peer_incarnation;
}

// The generation is read before the directory, which is brought up to date before a generation begins: so either the
// session is seen to be replaced, or the loss is one of a generation that may be over, and then aborts nothing.
void ControlPlane::lostSession(const Session& session, const std::string& why, bool silent) {
  const Generation generation = listener_.presentGeneration();
  const int peer = session.key.peer;
  if (isPlanned(session.key)) {
    const std::string text = "the process that was to take global rank " + std::to_string(peer) + ": " + why;
    drop(session.id);
    return breakPlan(text);
  }
  if (isReplaced(session)) return drop(session.id);
  forget(peer);
  listener_.peerLost(generation, peer, why, silent);
}

void ControlPlane::lost(int peer, const std::string& why, bool silent) {
  const Generation generation = listener_.presentGeneration();
  forget(peer);
  listener_.peerLost(generation, peer, why, silent);
}

// Drops everything to do with `peer`, but for what a switch prepares for its rank; says nothing to anybody.
void ControlPlane::forget(int peer) {
  const auto of_it = [&](const Key& key) { return key.peer == peer && !isPlanned(key); };
  std::vector<std::uint64_t> ids;
  for (const auto& [id, session] : sessions_) {
    if (session->authenticated && of_it(session->key)) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) drop(id);
  controls_.erase(peer);
  for (auto at = wants_.begin(); at != wants_.end();) at = of_it(at->first) ? wants_.erase(at) : ++at;
  // What was delivered of one that has left is still of use, and may be on its way to its communicator: never again.
  if (left_.count(peer) == 0) {
    for (auto at = delivered_.begin(); at != delivered_.end();) at = of_it(*at) ? delivered_.erase(at) : ++at;
  }
  dropNotes(peer);
  std::lock_guard<std::mutex> lock(doorbells_mutex_);
  doorbells_.erase(peer);
}

}  // namespace trainmover
