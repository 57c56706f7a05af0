// Connections on their way: accepting, connecting, handshakes, and what becomes of them.
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/control_limits.h"
#include "runtime/control_plane.h"
#include "runtime/sockets.h"
#include "transport/shm/link.h"
#include "transport/tcp/link.h"

namespace trainmover {
namespace {

Nonce newNonce() {
  Nonce nonce{};
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw TransportError("the kernel gives no random numbers");
  }
  return nonce;
}

}  // namespace

Session& ControlPlane::addSession(Descriptor socket, bool local, bool initiator) {
  auto session = std::make_unique<Session>();
  session->id = next_session_++;
  session->socket = std::move(socket);
  session->local = local;
  session->initiator = initiator;
  session->deadline_ms = monotonicMs() + kHandshakeLimitMs;
  Session& added = *session;
  (initiator ? made_ : accepted_).fetch_add(1, std::memory_order_relaxed);
  sessions_.emplace(added.id, std::move(session));
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (initiator ? EPOLLOUT : 0u);
  event.data.u64 = added.id;
  ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, added.socket.get(), &event);
  return added;
}

void ControlPlane::watch(Session& session, bool for_write) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (for_write ? EPOLLOUT : 0u);
  event.data.u64 = session.id;
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, session.socket.get(), &event);
}

bool ControlPlane::handshakeSend(Session& session, const void* data, std::size_t bytes,
                                 const std::vector<int>& descriptors) {
  sent_.fetch_add(1, std::memory_order_relaxed);
  return sendWith(session.socket.get(), data, bytes, descriptors);
}

void ControlPlane::drop(std::uint64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = *found->second;
  if (!session.initiator && !session.authenticated) --unauthenticated_;
  for (auto* controls : {&controls_, &plan_.controls}) {
    const auto control = controls->find(session.key.peer);
    if (control != controls->end() && control->second == id) controls->erase(control);
  }
  const auto wanted = wants_.find(session.key);
  if (wanted != wants_.end() && wanted->second.session == id) {
    if (session.initiator && session.hello_sent && !session.calling->welcome()) {
      wanted->second.unanswered_ms = monotonicMs();
    }
    wanted->second.session = 0;
    wanted->second.next_ms = monotonicMs() + kRetryMs;
  }
  if (session.socket) ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, session.socket.get(), nullptr);
  sessions_.erase(found);
}

void ControlPlane::acceptAll(const Descriptor& listener, bool local) {
  for (int count = 0; count < kUnauthenticatedMax; ++count) {
    Descriptor socket = acceptOn(listener);
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) ::usleep(kNoDescriptorsPauseUs);  // else this would spin
      return;
    }
    if (unauthenticated_ >= kUnauthenticatedMax) {
      refused_.fetch_add(1);
      log_.warn(config_.global_rank, "refused a connection: too many that have not proved who they are");
      continue;  // closes it
    }
    if (!local) tcp::configureSocket(socket.get(), config_.settings.peer_timeout_ms);
    ++unauthenticated_;
    Session& session = addSession(std::move(socket), local, false);
    session.acceptor.emplace(config_.token, newNonce());
    const auto challenge = session.acceptor->challenge();
    if (!handshakeSend(session, challenge.data(), challenge.size(), {})) drop(session.id);
  }
}

void ControlPlane::connectFor(const Key& key, Want& want, std::uint64_t now_ms) {
  const bool planned = isPlanned(key);
  const auto endpoint = planned ? std::optional<Endpoint>(plan_.endpoints.at(key.peer)) : directory_.find(key.peer);
  want.next_ms = now_ms + kRetryMs;
  if (!endpoint) return;  // until the deadline
  const bool local = sharesMemoryWith(*endpoint);
  int error = 0;
  Descriptor socket = local ? connectUnix(endpoint->socket, error) : connectTcp(endpoint->address, error);
  if (!socket) {
    if (error == ECONNREFUSED || error == ENOENT) nobodyListens(key, want, now_ms);
    return;
  }
  if (!local) tcp::configureSocket(socket.get(), config_.settings.peer_timeout_ms);
  Session& session = addSession(std::move(socket), local, true);
  session.state = SessionState::kConnecting;
  session.key = key;
  session.peer_incarnation = endpoint->incarnation;
  session.authenticated = true;  // counts incoming ones only
  session.deadline_ms = want.deadline_ms;
  Hello hello;
  hello.purpose = key.purpose;
  hello.job = config_.job;
  hello.communicator = key.communicator;
  const bool live_control = key.purpose == Purpose::kControl && !planned;
  hello.generation = live_control ? directory_.pairGeneration(key.peer, generation_) : key.generation;
  hello.from_rank = config_.global_rank;
  hello.to_rank = key.peer;
  hello.from_incarnation = config_.incarnation;
  hello.to_incarnation = endpoint->incarnation;
  session.calling.emplace(config_.token, newNonce(), hello);
  want.session = session.id;
}

// What goes wrong with one connection must not end the thread that watches them all.
void ControlPlane::serve(std::uint64_t id, std::uint32_t events) {
  if (sessions_.count(id) == 0) return;
  try {
    serveState(*sessions_.at(id), events);
  } catch (const TransportError& error) {
    // Ours to give: what waits for this connection must not wait for ever.
    const Session& session = *sessions_.at(id);
    const bool planned = session.authenticated && isPlanned(session.key);
    if (session.authenticated && !planned) listener_.refused(session.key.peer, error.what());
    drop(id);
    if (planned) breakPlan(error.what());
  } catch (const std::exception& error) {
    refused_.fetch_add(1);
    log_.warn(config_.global_rank, std::string("dropped a connection: ") + error.what());
    drop(id);
  }
}

void ControlPlane::serveState(Session& session, std::uint32_t events) {
  switch (session.state) {
    case SessionState::kConnecting:
      return serveConnecting(session);
    case SessionState::kHandshaking:
      return serveHandshake(session);
    case SessionState::kParked: {
      // A caller speaks only when it has been answered, so this is its end, or not our protocol.
      bool ended = false;
      char byte = 0;
      if ((events & (EPOLLIN | EPOLLRDHUP)) != 0 && (peekWith(session.socket.get(), &byte, 1, ended) > 0 || ended)) {
        drop(session.id);
      }
      return;
    }
    case SessionState::kPassing:
      return servePassing(session);
    case SessionState::kControl:
      if ((events & EPOLLOUT) != 0 && flush(session)) {
        watch(session, false);
        pumpNotes(session.key.peer);
      }
      return serveControl(session);
    case SessionState::kLeaving:
      return serveLeaving(session);
  }
}

void ControlPlane::serveConnecting(Session& session) {
  const int error = connectError(session.socket);
  if (error != 0) return connectFailed(session, error);
  session.state = SessionState::kHandshaking;
  if (const auto wanted = wants_.find(session.key); wanted != wants_.end()) wanted->second.refused = 0;
  watch(session, false);
  serveHandshake(session);
}

void ControlPlane::connectFailed(Session& session, int error) {
  const Key key = session.key;
  drop(session.id);
  const auto found = wants_.find(key);
  if (found != wants_.end() && error == ECONNREFUSED) nobodyListens(key, found->second, monotonicMs());
}

// It may be gone, or its slot may have moved and its successor's address be on its way: for that there is a moment, as
// leavers live until all have been told. A joiner has only just told where it listens.
void ControlPlane::nobodyListens(const Key& key, Want& want, std::uint64_t now_ms) {
  if (want.refused++ == 0) want.refused_since_ms = now_ms;
  if (isPlanned(key)) {
    if (want.refused < kRefusedAttemptsMax) return;
    return breakPlan("global rank " + std::to_string(key.peer) + ": nobody listens at the joiner's endpoint");
  }
  if (elapsedMs(want.refused_since_ms, now_ms) > std::min(kGoneAfterMs, config_.settings.peer_timeout_ms)) {
    lost(key.peer, "nobody listens where it did", false);
  }
}

void ControlPlane::serveHandshake(Session& session) {
  std::uint8_t bytes[kHandshakeMessageBytesMax];
  const std::uint64_t id = session.id;
  for (int messages = 0; messages < 4; ++messages) {
    bool ended = false;
    const long there = peekWith(session.socket.get(), bytes, sizeof bytes, ended);
    if (ended) return drop(id);
    if (there == 0) return;
    const std::size_t used = session.initiator ? session.calling->receive(bytes, static_cast<std::size_t>(there))
                                               : session.acceptor->receive(bytes, static_cast<std::size_t>(there));
    if (used > 0 && receiveWith(session.socket.get(), bytes, used, session.received, kPassedDescriptorsMax) !=
                        static_cast<long>(used)) {
      return drop(id);
    }
    if (session.initiator && !session.calling->hello().empty() && !session.hello_sent) {
      received_.fetch_add(1, std::memory_order_relaxed);
      session.hello_sent = true;
      const auto& hello = session.calling->hello();
      if (!handshakeSend(session, hello.data(), hello.size(), {})) return drop(id);
    }
    if (session.initiator && session.calling->welcome()) {
      received_.fetch_add(1, std::memory_order_relaxed);
      return welcomed(session);
    }
    if (!session.initiator && session.acceptor->hello()) {
      const Hello& hello = *session.acceptor->hello();
      session.authenticated = true;
      --unauthenticated_;
      received_.fetch_add(1, std::memory_order_relaxed);
      const Generation generation = hello.purpose == Purpose::kControl ? 0 : hello.generation;
      session.key = {hello.purpose, hello.communicator, generation, hello.from_rank};
      session.peer_incarnation = hello.from_incarnation;
      session.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
      return judge(session);
    }
    if (used == 0) return;
  }
}

void ControlPlane::servePassing(Session& session) {
  const Key key = session.key;
  const std::uint64_t id = session.id;
  std::uint8_t byte = 0;
  const long got = receiveWith(session.socket.get(), &byte, 1, session.received, kPassedDescriptorsMax);
  if (got == 0) return;
  received_.fetch_add(1, std::memory_order_relaxed);
  const std::size_t due = key.purpose == Purpose::kControl && session.local ? 2 : 0;
  if (got < 0 || session.received.size() != due || delivered_.count(key) != 0) return drop(id);
  if (key.purpose == Purpose::kControl) return takeControl(session);
  if (key.purpose == Purpose::kSegment) return drop(id);
  fulfilled(key);
  install(session, key, true);
  drop(id);
}

// Makes a link of a connection whose handshake is over.
void ControlPlane::install(Session& session, const Key& key, bool creator) {
  if (session.local) {
    if (!creator) session.segment = Mapping::attach(session.received[0], shm::segmentBytes());
    return deliverLink(key, localLink(std::move(session.segment), key, creator));
  }
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, session.socket.get(), nullptr);
  deliverLink(key, tcp::makeLink(std::move(session.socket)));
}

void ControlPlane::welcomed(Session& session) {
  const Key key = session.key;
  const Welcome welcome = *session.calling->welcome();
  const std::uint64_t id = session.id;
  if (welcome.verdict != Verdict::kWelcome) {
    drop(id);
    const std::string why = std::string(nameOf(welcome.verdict)) + ": " + welcome.reason;
    const bool for_good = welcome.verdict == Verdict::kWrongJob || welcome.verdict == Verdict::kWrongRank;
    const bool stale = welcome.verdict == Verdict::kStaleGeneration;
    if (isPlanned(key)) {
      if (for_good || stale) breakPlan("global rank " + std::to_string(key.peer) + " refused: " + why);
    } else if (for_good) {
      listener_.refused(key.peer, why);
      wants_.erase(key);
    } else if (const auto wanted = wants_.find(key); stale && wanted != wants_.end()) {
      wanted->second.next_ms = monotonicMs() + kStaleRetryMs;
    }
    return;  // else tried again, until the deadline
  }
  const std::size_t due = !session.local ? 0 : key.purpose == Purpose::kControl ? 2 : 1;
  if (session.received.size() != due) return drop(id);
  std::vector<int> passed;
  if (key.purpose == Purpose::kControl && session.local) passed = {doorbell_.memory().get(), doorbell_.event()};
  const std::uint8_t confirmation = 0;
  if (!handshakeSend(session, &confirmation, 1, passed)) return drop(id);
  if (key.purpose == Purpose::kControl) return takeControl(session);
  std::size_t segment_bytes = 0;
  if (const auto wanted = wants_.find(key); wanted != wants_.end()) {
    segment_bytes = wanted->second.bytes;
    wanted->second.session = 0;  // this session is dropped below, not by fulfilled()
  }
  fulfilled(key);
  if (key.purpose == Purpose::kSegment) {
    auto segment = std::make_shared<Mapping>(Mapping::attach(session.received[0], segment_bytes));
    const auto user = users_.find(key.communicator);
    if (user != users_.end()) {
      listener_.deliver([user = user->second.user, segment, key] {
        if (const auto alive = user.lock()) alive->segmentReady(key.generation, std::move(*segment));
      });
    }
  } else {
    install(session, key, false);
  }
  drop(id);
}

std::unique_ptr<Link> ControlPlane::localLink(Mapping segment, const Key& key, bool creator) {
  shm::LinkConfig config;
  config.creator = creator;
  config.read_remote = config_.settings.use_cross_memory;
  const auto planned = plan_.doorbells.find(key.peer);
  const bool of_plan = isPlanned(key) && planned != plan_.doorbells.end();
  config.ring_peer = [doorbell = of_plan ? planned->second : doorbellOf(key.peer)] {
    if (doorbell) doorbell->ring();
  };
  return shm::makeLink(std::move(segment), std::move(config));
}

void ControlPlane::deliverLink(const Key& key, std::unique_ptr<Link> link) {
  const auto user = users_.find(key.communicator);
  if (user == users_.end()) return;
  auto shared = std::make_shared<std::unique_ptr<Link>>(std::move(link));
  listener_.deliver([user = user->second.user, shared, key] {
    if (const auto alive = user.lock()) alive->linkReady(key.generation, key.peer, std::move(*shared));
  });
}

}  // namespace trainmover
