#include "runtime/progress_thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "base/errors.h"

namespace trainmover {
namespace {

constexpr int kTickMs = 50;  // limits of operations nobody waits for are looked at this often
constexpr int kIdleTickMs = 500;

}  // namespace

ProgressThread::ProgressThread(Engine& engine)
    : engine_(engine), events_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!events_ || !wake_) throw TransportError("no descriptors left for the progress thread");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_.get();
  ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  event.events = 0;
  event.data.fd = engine_.dataEvents();
  ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, engine_.dataEvents(), &event);
  engine_.onArm([this] { arm(); });
  thread_ = std::thread([this] { run(); });
}

// One-shot: while another thread drives, the view that has fired stays silent until that thread leaves and re-arms it.
void ProgressThread::arm() {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = engine_.dataEvents();
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, engine_.dataEvents(), &event);
}

void ProgressThread::poke() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void ProgressThread::later(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    later_.push_back(std::move(work));
  }
  poke();
}

bool ProgressThread::runLater() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work.swap(later_);
  }
  for (auto& task : work) task();
  return !work.empty();
}

void ProgressThread::run() {
  // Signals are for the interpreter's main thread.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "tm-progress");
  while (!stopping_.load(std::memory_order_acquire)) {
    epoll_event events[4];
    const int count = ::epoll_wait(events_.get(), events, 4, engine_.hasOutstanding() ? kTickMs : kIdleTickMs);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == engine_.dataEvents()) {
        engine_.disarmed();
      } else {
        std::uint64_t pokes = 0;
        [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &pokes, sizeof pokes);
      }
    }
    engine_.driveBriefly();
    runLater();
  }
  engine_.driveBriefly();
  runLater();
}

void ProgressThread::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  poke();
  thread_.join();
}

}  // namespace trainmover
