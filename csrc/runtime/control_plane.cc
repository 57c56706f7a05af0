// The thread, its timers and wishes. Connections under way are in control_sessions.cc, established control channels in
// control_channels.cc.
#include "runtime/control_plane.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <random>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "runtime/control_limits.h"
#include "runtime/sockets.h"

namespace trainmover {
namespace {

enum : std::uint64_t { kWakeId = 1, kTcpListenerId = 2, kUnixListenerId = 3 };

std::string randomName() {
  std::random_device device;
  char text[40];
  std::snprintf(text, sizeof text, "trainmover-%08x%08x%08x", device(), device(), device());
  return text;
}

// The machine as far as sharing memory goes: this boot of this kernel, this network namespace (abstract sockets,
// over which memory is passed, end at its border) and this process namespace (reads of memory name processes).
std::string thisMachine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  for (const char* space : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
    char target[64] = {};
    if (::readlink(space, target, sizeof target - 1) > 0) boot += std::string("/") + target;
  }
  return boot;
}

}  // namespace

ControlPlane::ControlPlane(ControlConfig config, Doorbell& doorbell, ControlListener& listener)
    : config_(std::move(config)),
      doorbell_(doorbell),
      listener_(listener),
      directory_(config_.global_rank),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      events_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!wake_ || !events_) throw TransportError("no descriptors left for the control plane");
  endpoint_.incarnation = config_.incarnation;
  endpoint_.pid = ::getpid();
  tcp_listener_ = listenTcp(config_.settings.bind_address, endpoint_.address);
  if (config_.settings.use_shared_memory) {
    endpoint_.socket = randomName();
    unix_listener_ = listenUnix(endpoint_.socket);
    endpoint_.machine_id = config_.settings.machine_id.empty() ? thisMachine() : config_.settings.machine_id;
  }
  const auto add = [&](const Descriptor& fd, std::uint64_t id) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (fd) ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd.get(), &event);
  };
  add(wake_, kWakeId);
  add(tcp_listener_, kTcpListenerId);
  add(unix_listener_, kUnixListenerId);
}

void ControlPlane::start() {
  thread_ = std::thread([this] { run(); });
}

void ControlPlane::stop() {
  if (!thread_.joinable()) return;
  command([this] {
    for (const auto& [id, session] : sessions_) {
      if (!mayTakeFrames(*session) || isPlanned(session->key)) continue;
      pumpNotes(session->key.peer, SIZE_MAX);
      sendFrame(*session, FrameKind::kGoodbye, generation_, 0, "");
    }
    stopping_.store(true, std::memory_order_release);
  });
  thread_.join();
  tcp_listener_.reset();  // whoever still calls finds out at once
  unix_listener_.reset();
  sessions_.clear();
  users_.clear();
}

void ControlPlane::run() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "tm-control");
  while (!stopping_.load(std::memory_order_acquire)) {
    epoll_event events[32];
    const int count = ::epoll_wait(events_.get(), events, 32, tickMs());
    for (int i = 0; i < count; ++i) {
      switch (events[i].data.u64) {
        case kWakeId: {
          std::uint64_t wakes = 0;
          [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &wakes, sizeof wakes);
          break;
        }
        case kTcpListenerId:
          acceptAll(tcp_listener_, false);
          break;
        case kUnixListenerId:
          acceptAll(unix_listener_, true);
          break;
        default:
          serve(events[i].data.u64, events[i].events);
      }
    }
    try {
      runCommands();
      timers(monotonicMs());
    } catch (const std::exception& error) {
      log_.warn(config_.global_rank, error.what());  // no descriptors or memory just now: tried again
    }
  }
}

int ControlPlane::tickMs() const {
  const std::uint64_t fraction = std::max<std::uint64_t>(1, config_.settings.peer_timeout_ms / 8);
  return static_cast<int>(std::min<std::uint64_t>(wants_.empty() ? kTickMs : kBusyTickMs, fraction));
}

void ControlPlane::command(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(commands_mutex_);
    commands_.push_back(std::move(work));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void ControlPlane::runCommands() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard<std::mutex> lock(commands_mutex_);
    work.swap(commands_);
  }
  for (auto& task : work) task();
}

void ControlPlane::addUser(std::uint64_t communicator, std::uint64_t serial, std::vector<int> global_ranks,
                           std::weak_ptr<LinkUser> user) {
  command([this, communicator, serial, ranks = std::move(global_ranks), user = std::move(user)]() mutable {
    dropLinksOf(communicator);
    User& entry = users_[communicator];
    entry = User{};
    entry.serial = serial;
    entry.global_ranks = std::move(ranks);
    entry.user = std::move(user);
  });
}

void ControlPlane::removeUser(std::uint64_t communicator, std::uint64_t serial) {
  command([this, communicator, serial] {
    const auto found = users_.find(communicator);
    if (found == users_.end() || found->second.serial != serial) return;
    users_.erase(found);
    dropLinksOf(communicator);
  });
}

void ControlPlane::dropLinksOf(std::uint64_t communicator) {
  const auto of_it = [&](const Key& key) {
    return key.purpose != Purpose::kControl && key.communicator == communicator;
  };
  for (auto at = wants_.begin(); at != wants_.end();) at = of_it(at->first) ? wants_.erase(at) : ++at;
  for (auto at = delivered_.begin(); at != delivered_.end();) at = of_it(*at) ? delivered_.erase(at) : ++at;
}

void ControlPlane::setGeneration(Generation generation) {
  command([this, generation] {
    clearPlan();
    generation_ = generation;
    for (auto at = wants_.begin(); at != wants_.end();) {
      at = at->first.purpose != Purpose::kControl && at->second.recovery < generation ? wants_.erase(at) : ++at;
    }
    for (auto at = delivered_.begin(); at != delivered_.end();) {
      at = at->generation < generation ? delivered_.erase(at) : ++at;
    }
    std::vector<std::uint64_t> old;
    for (const auto& [id, session] : sessions_) {
      const bool link = session->authenticated && session->key.purpose != Purpose::kControl;
      if (link && session->key.generation < generation) old.push_back(id);
    }
    for (const std::uint64_t id : old) drop(id);
    for (auto& [id, user] : users_) {
      if (user.segment_generation < generation) user.segment.reset();
    }
  });
}

void ControlPlane::directoryChanged() {
  command([this] {
    // A rank that is another process now: its old connections go, and whoever waits for one turns to the new process.
    std::set<int> turned;
    for (const auto& [id, session] : sessions_) {
      if (session->authenticated && isReplaced(*session) && !isPlanned(session->key)) turned.insert(session->key.peer);
    }
    for (const auto* gone : {&left_, &moved_}) {
      for (const auto& [peer, incarnation] : *gone) {
        const auto endpoint = directory_.find(peer);
        if (endpoint && endpoint->incarnation != incarnation) turned.insert(peer);
      }
    }
    for (const auto& [key, want] : wants_) {
      if (!isPlanned(key)) turned.insert(key.peer);
    }
    for (const int peer : turned) turnTo(peer);
  });
}

void ControlPlane::want(const Key& wanted, Generation recovery, std::size_t bytes) {
  command([this, wanted, recovery, bytes] {
    Key key = wanted;
    if (key.purpose == Purpose::kControl) {
      if (controlOf(key.peer) != nullptr) return;
    } else {
      if (recovery != generation_) return;
      key.generation = directory_.pairGeneration(key.peer, generation_);
    }
    if (delivered_.count(key) != 0 || given_up_ != 0) return;
    Want& entry = wants_[key];
    if (entry.deadline_ms == 0) entry.deadline_ms = monotonicMs() + config_.settings.connect_timeout_ms;
    entry.bytes = bytes;
    entry.recovery = recovery;
  });
}

void ControlPlane::wantControl(int global_rank) { want({Purpose::kControl, 0, 0, global_rank}, 0, 0); }

void ControlPlane::wantLink(std::uint64_t communicator, Generation generation, int global_rank) {
  want({Purpose::kLink, communicator, 0, global_rank}, generation, 0);
}

void ControlPlane::wantSegment(std::uint64_t communicator, Generation generation, int global_rank, std::size_t bytes) {
  want({Purpose::kSegment, communicator, 0, global_rank}, generation, bytes);
}

void ControlPlane::offerSegment(std::uint64_t communicator, Generation generation, Descriptor memory) {
  auto shared = std::make_shared<Descriptor>(std::move(memory));
  command([this, communicator, generation, shared] {
    User& user = users_[communicator];
    user.segment_generation = generation;
    user.segment = std::move(*shared);
  });
}

bool ControlPlane::sharesMemory(int global_rank) const {
  if (global_rank == config_.global_rank) return !endpoint_.machine_id.empty();
  const auto endpoint = directory_.find(global_rank);
  return endpoint && sharesMemoryWith(*endpoint);
}

bool ControlPlane::sharesMemoryWith(const Endpoint& endpoint) const {
  return !endpoint.machine_id.empty() && endpoint.machine_id == endpoint_.machine_id;
}

std::shared_ptr<PeerDoorbell> ControlPlane::doorbellOf(int global_rank) const {
  std::lock_guard<std::mutex> lock(doorbells_mutex_);
  const auto found = doorbells_.find(global_rank);
  return found == doorbells_.end() ? nullptr : found->second;
}

void ControlPlane::timers(std::uint64_t now_ms) {
  std::vector<std::uint64_t> expired, parked;
  for (const auto& [id, session] : sessions_) {
    if (session->state == SessionState::kControl) continue;
    if (session->deadline_ms != 0 && now_ms > session->deadline_ms) {
      expired.push_back(id);
    } else if (session->state == SessionState::kParked) {
      parked.push_back(id);
    }
  }
  for (const std::uint64_t id : expired) {
    if (sessions_.count(id) != 0 && !sessions_.at(id)->authenticated) {
      refused_.fetch_add(1);
      log_.warn(config_.global_rank, "dropped a connection: it did not prove who it is in time");
    }
    drop(id);
  }
  for (const std::uint64_t id : parked) {
    if (sessions_.count(id) != 0) judge(*sessions_.at(id));
  }
  std::vector<Key> keys;
  for (const auto& [key, entry] : wants_) keys.push_back(key);
  for (const Key& key : keys) {
    const auto found = wants_.find(key);
    if (found != wants_.end()) pursue(key, found->second, now_ms);
  }
  heartbeats(now_ms);
}

// A call for a link has waited at a peer that lives, and was not answered: it holds its links, or has not made the
// communicator yet. How long that may last is for the operation's own limit.
bool ControlPlane::isHeld(const Key& key, const Want& want, std::uint64_t now_ms) {
  const bool waited = want.unanswered_ms != 0 && elapsedMs(want.unanswered_ms, now_ms) < kHandshakeLimitMs;
  return waited && key.purpose != Purpose::kControl && !isPlanned(key) && controlOf(key.peer) != nullptr;
}

void ControlPlane::pursue(const Key& key, Want& want, std::uint64_t now_ms) {
  // The peer may have called first, while this was still meant for the process that held its rank before.
  if (key.purpose == Purpose::kControl ? controlFor(key) != nullptr : delivered_.count(key) != 0) {
    return endWant(key);
  }
  const bool planned = isPlanned(key);
  const bool moved = !planned && moved_.count(key.peer) != 0;
  if (!planned && left_.count(key.peer) != 0) return lost(key.peer, "it has left", false);
  if (now_ms > want.deadline_ms && isHeld(key, want, now_ms)) {
    want.deadline_ms = now_ms + config_.settings.connect_timeout_ms;
  }
  if (now_ms > want.deadline_ms) {
    const std::string why = "no connection within " + std::to_string(config_.settings.connect_timeout_ms) + " ms" +
                            (moved ? "; another process holds its rank now, and nobody has told where" : "");
    return planned ? breakPlan("global rank " + std::to_string(key.peer) + ": " + why) : lost(key.peer, why, false);
  }
  if (want.session != 0 || now_ms < want.next_ms || moved || welcomedAlready(key)) return;
  if (key.purpose != Purpose::kControl && controlFor(key) == nullptr) {
    const Key control{Purpose::kControl, 0, planned ? key.generation : 0, key.peer};
    if (wants_.count(control) != 0) return;
    Want& first = wants_[control];
    first.deadline_ms = want.deadline_ms;
    return pursue(control, first, now_ms);
  }
  connectFor(key, want, now_ms);
}

void ControlPlane::fulfilled(const Key& key) {
  delivered_.insert(key);
  endWant(key);
}

// What is under way for it is given up, unless it is the control channel by now.
void ControlPlane::endWant(const Key& key) {
  const auto found = wants_.find(key);
  if (found == wants_.end()) return;
  const std::uint64_t under_way = found->second.session;
  wants_.erase(found);
  const auto session = sessions_.find(under_way);
  if (session != sessions_.end() && session->second->state != SessionState::kControl) drop(under_way);
}

}  // namespace trainmover
