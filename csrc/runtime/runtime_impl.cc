// Start and end, communicators, what a loss, a farewell or an abort means, resuming. See runtime_impl.h.
#include "runtime/runtime_impl.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "wire/sha256.h"

namespace trainmover {
namespace {

std::uint64_t newIncarnation() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
}

Digest jobDigest(const JobIdentity& identity) {
  const std::string text = identity.job_id + '\n' + identity.constants;
  return sha256(text.data(), text.size());
}

std::uint64_t communicatorId(const std::string& name) {
  const Digest digest = sha256(name.data(), name.size());
  std::uint64_t id = 0;
  for (int i = 0; i < 8; ++i) id = id << 8 | digest[static_cast<std::size_t>(i)];
  return id | 1;  // 0 is for control channels
}

}  // namespace

RuntimeImpl::RuntimeImpl(int global_rank, const JobIdentity& identity, Settings settings, Mode mode)
    : global_rank_(global_rank),
      settings_(std::move(settings)),
      mode_(mode),
      process_(::getpid()),
      recorder_(settings_.flight_recorder_entries),
      trace_(settings_.trace_path.empty()
                 ? nullptr
                 : std::make_unique<OperationTrace>(settings_.trace_path + std::to_string(global_rank_))),
      engine_(settings_.local_ranks <= std::thread::hardware_concurrency()),
      control_({global_rank, newIncarnation(), identity.token, jobDigest(identity), settings_}, engine_.doorbell(),
               *this),
      progress_(engine_) {
  // Where a kernel lets only a parent read a process's memory, this lets the ranks of the job do so.
  if (settings_.use_cross_memory) ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  control_.directory().add({{global_rank_, control_.endpoint()}}, 1);
  control_.start();
}

std::shared_ptr<Communicator> RuntimeImpl::createCommunicator(const std::string& name, std::vector<int> global_ranks,
                                                              std::chrono::milliseconds timeout) {
  const auto own = std::find(global_ranks.begin(), global_ranks.end(), global_rank_);
  if (own == global_ranks.end()) {
    throw std::invalid_argument("global rank " + std::to_string(global_rank_) + " is not a member of group " + name);
  }
  CommunicatorConfig config{name, communicatorId(name), std::move(global_ranks), 0, timeout, ++communicators_made_};
  config.rank = static_cast<int>(own - config.global_ranks.begin());
  CommunicatorHost& host = *this;
  auto made = std::make_shared<CommunicatorImpl>(host, config);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& other : communicators_) {
    const auto alive = other.lock();
    if (alive && alive->id() == config.id && !alive->isClosed()) {
      throw std::invalid_argument("a communicator named " + name + " exists already in this process");
    }
  }
  communicators_.erase(std::remove_if(communicators_.begin(), communicators_.end(),
                                      [](const auto& communicator) { return communicator.expired(); }),
                       communicators_.end());
  communicators_.push_back(made);
  control_.addUser(config.id, config.serial, made->globalRanks(), made);
  return made;
}

void RuntimeImpl::checkUsable() const {
  if (::getpid() != process_) {
    throw TransportError("this is a forked child of the rank; only the process that joined the group may communicate");
  }
  if (role_.load(std::memory_order_relaxed) == Role::kGone) {
    throw SwitchError("global rank " + std::to_string(global_rank_) +
                      " is another process's by now; this one has left the job and may only end");
  }
  if (!engine_.isAborted()) return;
  if (const auto cause = engine_.aborted()) throw CollectiveAborted(cause->generation, cause->culprit, cause->why);
}

void RuntimeImpl::abortWith(const AbortCause& cause) {
  if (role_.load() == Role::kGone || !engine_.abort(cause)) return;
  control_.tellAbort(cause);
  deliver([this, why = cause.why] {
    if (engine_.isAborted()) voidPlan("collectives were aborted: " + why);
  });
  std::function<void()> callback;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    callback = on_abort_;
  }
  if (callback) {
    progress_.later(std::move(callback));
  } else {
    progress_.poke();
  }
}

// An abort of a generation that this rank has not entered yet is a sticky floor: it holds for this one too, and again
// as soon as that one is entered.
void RuntimeImpl::abortHeard(std::uint32_t generation, const AbortCause& heard) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (role_.load() == Role::kJoining) heard_joining_ = std::make_pair(generation, heard);
  }
  if (joinBroke(heard.why)) return;
  AbortCause cause = heard;
  {
    // Under the lock that resume() takes once it has entered its generation: what is kept here is seen there, or that
    // generation is seen here.
    std::lock_guard<std::mutex> lock(mutex_);
    const Generation current = this->generation();
    const auto ahead = static_cast<std::int32_t>(generation - static_cast<std::uint32_t>(current));
    if (ahead < 0) return;
    cause.generation = current + static_cast<Generation>(ahead);
    if (ahead > 0) {
      ahead_ = cause;
      cause.generation = current;
    }
  }
  abortWith(cause);
}

void RuntimeImpl::closed(std::uint64_t communicator, std::uint64_t serial) {
  control_.removeUser(communicator, serial);
  std::lock_guard<std::mutex> lock(engine_.mutex());
  if (!plan_) return;
  for (const auto& [global_rank, endpoint] : plan_->moved()) plan_->linkUp({communicator, global_rank});
}

void RuntimeImpl::peerLeft(int global_rank) {
  deliver([this, global_rank] {
    for (const auto& communicator : communicators()) communicator->peerLeft(global_rank);
  });
}

// The directory changes once the old links are gone and before links of the new generation can be delivered, which
// takes the engine's lock: a link made any earlier would be dropped with the old ones, and its other end would take
// that for a death. It changes before the generation does because of lostSession().
void RuntimeImpl::resume(Generation generation, const std::map<int, Endpoint>& endpoints) {
  {
    std::lock_guard<std::mutex> lock(engine_.mutex());
    const Generation current = this->generation();
    const Generation known = std::max({current, last_switch_, control_.directory().newest()});
    if (generation <= known) {
      throw SwitchError(
          "resume: found generation " + std::to_string(generation) + ", expected one above " + std::to_string(known) +
          ", the latest known here; generations are never used twice, and endpoints of this one come with "
          "this call");
    }
    if (role_.load() == Role::kGone) throw SwitchError("resume: this process has given its rank up and may only end");
    plan_.reset();
    if (std::exchange(held_, 0) != 0) control_.hold(0, 0);
    role_.store(Role::kMember);
    AbortCause cause = engine_.aborted().value_or(AbortCause{});
    if (cause.why.empty()) cause = {current, -1, "resumed as generation " + std::to_string(generation), false, false};
    const auto all = communicators();
    for (const auto& communicator : all) communicator->fail(cause);
    control_.directory().add(endpoints, generation);
    engine_.enter(generation);
    for (const auto& communicator : all) communicator->resume();
    control_.setGeneration(generation);
    if (!endpoints.empty()) control_.directoryChanged();
  }
  engine_.settle();
  std::optional<AbortCause> ahead;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ahead_ && ahead_->generation == generation) ahead = std::exchange(ahead_, std::nullopt);
  }
  if (ahead) abortWith(*ahead);
}

std::vector<std::shared_ptr<CommunicatorImpl>> RuntimeImpl::communicators() const {
  std::vector<std::shared_ptr<CommunicatorImpl>> alive;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& communicator : communicators_) {
    if (auto strong = communicator.lock()) alive.push_back(std::move(strong));
  }
  return alive;
}

MemoryStats RuntimeImpl::memoryStats() const {
  MemoryStats stats;
  stats.flight_recorder = recorder_.heldBytes();
  stats.shared_segments = kDoorbellBytes;
  auto& engine = const_cast<Engine&>(engine_);
  const auto all = communicators();
  std::lock_guard<std::mutex> lock(engine.mutex());
  for (const auto& communicator : all) communicator->addMemory(stats);
  return stats;
}

std::vector<CommunicatorStats> RuntimeImpl::communicatorStats() const {
  std::vector<CommunicatorStats> stats;
  for (const auto& communicator : communicators()) stats.push_back(communicator->stats());
  return stats;
}

void RuntimeImpl::shutdown() {
  if (::getpid() != process_) return;  // a forked child: threads and connections are its parent's
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return;
    shut_down_ = true;
  }
  // Farewell comes before the links go, so that nobody takes their end for a death.
  control_.stop();
  for (const auto& communicator : communicators()) communicator->close();
  progress_.stop();
  notes_.close();
}

std::shared_ptr<Runtime> Runtime::create(int global_rank, JobIdentity identity, Settings settings, Mode mode) {
  return std::make_shared<RuntimeImpl>(global_rank, identity, std::move(settings), mode);
}

}  // namespace trainmover
