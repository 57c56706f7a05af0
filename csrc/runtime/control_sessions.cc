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

void ControlPlane::drop(std::uint64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = *found->second;
  if (!session.initiator && !session.authenticated) --unauthenticated_;
  const auto control = controls_.find(session.key.peer);
  if (control != controls_.end() && control->second == id) controls_.erase(control);
  const auto wanted = wants_.find(session.key);
  if (wanted != wants_.end() && wanted->second.session == id) {
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
    if (!sendWith(session.socket.get(), challenge.data(), challenge.size(), {})) drop(session.id);
  }
}

void ControlPlane::connectFor(const Key& key, Want& want, std::uint64_t now_ms) {
  const auto endpoint = directory_.find(key.peer);
  want.next_ms = now_ms + kRetryMs;
  if (!endpoint) return;  // until the deadline
  const bool local = sharesMemory(key.peer);
  int error = 0;
  Descriptor socket = local ? connectUnix(endpoint->socket, error) : connectTcp(endpoint->address, error);
  if (!socket) {
    const bool nobody = error == ECONNREFUSED || error == ENOENT;
    if (nobody && ++want.refused >= kRefusedAttemptsMax) lost(key.peer, "nobody listens where it did", false);
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
  hello.generation = key.generation;
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
    if (session.authenticated) listener_.refused(session.key.peer, error.what());
    drop(id);
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
      return serveControl(session);
  }
}

void ControlPlane::serveConnecting(Session& session) {
  const int error = connectError(session.socket);
  if (error != 0) return connectFailed(session, error);
  session.state = SessionState::kHandshaking;
  watch(session, false);
  serveHandshake(session);
}

void ControlPlane::connectFailed(Session& session, int error) {
  const Key key = session.key;
  drop(session.id);
  const auto found = wants_.find(key);
  if (found == wants_.end()) return;
  if (error == ECONNREFUSED && ++found->second.refused >= kRefusedAttemptsMax) {
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
      session.hello_sent = true;
      const auto& hello = session.calling->hello();
      if (!sendWith(session.socket.get(), hello.data(), hello.size(), {})) return drop(id);
    }
    if (session.initiator && session.calling->welcome()) return welcomed(session);
    if (!session.initiator && session.acceptor->hello()) {
      const Hello& hello = *session.acceptor->hello();
      session.authenticated = true;
      --unauthenticated_;
      session.key = {hello.purpose, hello.communicator, hello.generation, hello.from_rank};
      session.peer_incarnation = hello.from_incarnation;
      session.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
      return judge(session);
    }
    if (used == 0) return;
  }
}

// Answers an authenticated HELLO, or parks it until what it asks for is there.
void ControlPlane::judge(Session& session) {
  bool park = false;
  const Welcome welcome = verdictOn(*session.acceptor->hello(), park);
  if (park) {
    if (session.state == SessionState::kParked) return;
    const auto parked = std::count_if(sessions_.begin(), sessions_.end(),
                                      [](const auto& entry) { return entry.second->state == SessionState::kParked; });
    if (parked < kParkedMax) {
      session.state = SessionState::kParked;
      return;
    }
  }
  if (welcome.verdict == Verdict::kWelcome && !park) return admit(session);
  Welcome refusal = welcome;
  if (park) refusal = {Verdict::kBusy, "too many connections wait here"};
  if (refusal.verdict != Verdict::kDuplicate) {
    refused_.fetch_add(1);
    log_.warn(config_.global_rank, "refused a connection of global rank " + std::to_string(session.key.peer) + ": " +
                                       nameOf(refusal.verdict) + ", " + refusal.reason);
  }
  const auto answer = session.acceptor->welcome(refusal);
  sendWith(session.socket.get(), answer.data(), answer.size(), {});
  drop(session.id);
}

bool ControlPlane::welcomedAlready(const Key& key) const {
  return std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
    const Session& session = *entry.second;
    return session.state == SessionState::kPassing && !(session.key < key) && !(key < session.key);
  });
}

Welcome ControlPlane::verdictOn(const Hello& hello, bool& park) {
  if (hello.job != config_.job) {
    return {Verdict::kWrongJob, "another job, or other constants: all ranks must run one version with equal settings"};
  }
  if (hello.to_rank != config_.global_rank) {
    return {Verdict::kWrongRank, "this is global rank " + std::to_string(config_.global_rank)};
  }
  if (hello.to_incarnation != config_.incarnation) return {Verdict::kWrongIncarnation, "that process is gone"};
  const auto known = directory_.find(hello.from_rank);
  if (!known) return park = true, Welcome{};
  if (known->incarnation != hello.from_incarnation) {
    return {Verdict::kWrongIncarnation, "the caller is not the process that holds its rank here"};
  }
  const Key key{hello.purpose, hello.communicator, hello.generation, hello.from_rank};
  const auto own = wants_.find(key);
  const bool mine_first = own != wants_.end() && own->second.session != 0 && config_.global_rank < hello.from_rank;
  if (hello.purpose == Purpose::kControl) {
    if (controls_.count(hello.from_rank) != 0 || mine_first || welcomedAlready(key)) {
      return {Verdict::kDuplicate, "one is there"};
    }
    return {};
  }
  if (delivered_.count(key) != 0 || mine_first || welcomedAlready(key)) return {Verdict::kDuplicate, "one is there"};
  if (hello.generation < generation_) {
    return {Verdict::kStaleGeneration, "this is generation " + std::to_string(generation_)};
  }
  const auto user = users_.find(hello.communicator);
  park = hello.generation > generation_ || user == users_.end() || user->second.global_ranks.empty() ||
         controlOf(hello.from_rank) == nullptr ||
         (hello.purpose == Purpose::kSegment &&
          (!user->second.segment || user->second.segment_generation != hello.generation));
  if (park) return {};
  const auto& ranks = user->second.global_ranks;
  if (std::find(ranks.begin(), ranks.end(), hello.from_rank) == ranks.end()) {
    return {Verdict::kWrongRank, "not a member of this communicator"};
  }
  return {};
}

// Says welcome. What the connection is for is installed here only when the caller confirms that it has it too: else a
// caller that gave up meanwhile would be told for ever that there is one already.
void ControlPlane::admit(Session& session) {
  const Key key = session.key;
  const auto welcome = session.acceptor->welcome({});
  std::vector<int> passed;
  Descriptor memory;
  if (key.purpose == Purpose::kControl && session.local) passed = {doorbell_.memory().get(), doorbell_.event()};
  if (key.purpose == Purpose::kSegment) passed = {users_[key.communicator].segment.get()};
  if (key.purpose == Purpose::kLink && session.local) {
    session.segment = Mapping::create("trainmover-link", shm::segmentBytes(), memory);
    passed = {memory.get()};
  }
  if (!sendWith(session.socket.get(), welcome.data(), welcome.size(), passed)) return drop(session.id);
  session.state = SessionState::kPassing;
}

void ControlPlane::servePassing(Session& session) {
  const Key key = session.key;
  const std::uint64_t id = session.id;
  std::uint8_t byte = 0;
  const long got = receiveWith(session.socket.get(), &byte, 1, session.received, kPassedDescriptorsMax);
  if (got == 0) return;
  const std::size_t due = key.purpose == Purpose::kControl && session.local ? 2 : 0;
  if (got < 0 || session.received.size() != due || delivered_.count(key) != 0) return drop(id);
  if (key.purpose == Purpose::kControl) {
    if (controls_.count(key.peer) != 0) return drop(id);
    controls_[key.peer] = id;
    return controlUp(session);
  }
  if (key.purpose == Purpose::kSegment) return drop(id);
  fulfilled(key);
  install(session, key, true);
  drop(id);
}

// Makes a link of a connection whose handshake is over.
void ControlPlane::install(Session& session, const Key& key, bool creator) {
  if (session.local) {
    if (!creator) session.segment = Mapping::attach(session.received[0], shm::segmentBytes());
    return deliverLink(key, localLink(std::move(session.segment), key.peer, creator));
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
    if (welcome.verdict == Verdict::kWrongJob || welcome.verdict == Verdict::kWrongRank) {
      listener_.refused(key.peer, std::string(nameOf(welcome.verdict)) + ": " + welcome.reason);
      wants_.erase(key);
    }
    return;  // else tried again, until the deadline
  }
  const std::size_t due = !session.local ? 0 : key.purpose == Purpose::kControl ? 2 : 1;
  if (session.received.size() != due) return drop(id);
  std::vector<int> passed;
  if (key.purpose == Purpose::kControl && session.local) passed = {doorbell_.memory().get(), doorbell_.event()};
  const std::uint8_t confirmation = 0;
  if (!sendWith(session.socket.get(), &confirmation, 1, passed)) return drop(id);
  if (key.purpose == Purpose::kControl) {
    if (controls_.count(key.peer) != 0) return drop(id);
    controls_[key.peer] = id;
    return controlUp(session);
  }
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

std::unique_ptr<Link> ControlPlane::localLink(Mapping segment, int peer, bool creator) {
  shm::LinkConfig config;
  config.creator = creator;
  config.read_remote = config_.settings.use_cross_memory;
  config.ring_peer = [doorbell = doorbellOf(peer)] {
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
