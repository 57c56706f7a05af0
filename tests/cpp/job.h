// Runs a test's body in several forked processes, the ranks of a job: they talk through the parent, which collects what
// they print and how they end, and leaves none behind. Used by the tests of the runtime and by those that need a second
// process. Fork before any thread is made.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "runtime/runtime.h"

namespace trainmover::check {

constexpr std::uint64_t kJobLimitMs = 60'000;
constexpr std::uint32_t kJobMessageBytesMax = 1 << 20;

inline void writeAll(int fd, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::send(fd, from, bytes, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail(__FILE__, __LINE__, "the other end of a job's socket is gone");
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

inline void readAll(int fd, void* data, std::size_t bytes) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, to, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail(__FILE__, __LINE__, "the other end of a job's socket is gone");
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

/// One process of the job, as its body sees it.
class Member {
 public:
  Member(int rank, int size, int fd) : rank_(rank), size_(size), fd_(fd) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// What every rank gives; empty for those that have ended. Waits for all that live; the job's limit bounds it.
  std::vector<std::string> exchange(const std::string& text) {
    post('x', text);
    std::vector<std::string> all(static_cast<std::size_t>(size_));
    for (auto& one : all) {
      std::uint32_t bytes = 0;
      readAll(fd_, &bytes, sizeof bytes);
      one.resize(bytes);
      readAll(fd_, &one[0], bytes);
    }
    return all;
  }
  /// Waits until all that live are here.
  void meet() { exchange(""); }
  /// Hands a result to the parent.
  void report(const std::string& text) { post('r', text); }

 private:
  void post(char kind, const std::string& text) {
    const auto bytes = static_cast<std::uint32_t>(text.size());
    std::string message(1, kind);
    message.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    writeAll(fd_, (message + text).data(), message.size() + text.size());
  }
  int rank_, size_, fd_;
};

/// How one of them ended.
struct Ended {
  int exit_code = -1;  // -1: by a signal
  int signal = 0;
  std::string output;  // of both standard streams
  std::vector<std::string> reports;
};

class Job {
 public:
  Job(int size, const std::function<void(Member&)>& body) {
    std::fflush(nullptr);
    for (int rank = 0; rank < size; ++rank) start(rank, size, body);
  }
  ~Job() {
    for (Child& child : children_) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
      reap(child);
      closeOf(child.talk);
      closeOf(child.print);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Serves the ranks until all have ended; kills them and fails the test after `limit_ms`.
  std::vector<Ended> wait(std::uint64_t limit_ms = kJobLimitMs) {
    const std::uint64_t deadline_ms = monotonicMs() + limit_ms;
    while (serveOnce()) {
      if (monotonicMs() < deadline_ms) continue;
      std::string text = "a job did not end within " + std::to_string(limit_ms) + " ms";
      for (std::size_t rank = 0; rank < children_.size(); ++rank) {
        if (children_[rank].talk >= 0) text += "; rank " + std::to_string(rank) + " still runs";
        text += "\n" + children_[rank].ended.output;
      }
      fail(__FILE__, __LINE__, text);
    }
    std::vector<Ended> all;
    for (Child& child : children_) {
      reap(child);
      all.push_back(child.ended);
    }
    return all;
  }

 private:
  struct Child {
    pid_t pid = -1;
    int talk = -1, print = -1;
    std::string incoming;
    bool waits = false;  // its exchange is under way
    std::string given;
    Ended ended;
  };

  static void closeOf(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }

  void start(int rank, int size, const std::function<void(Member&)>& body) {
    int talk[2], print[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, talk) != 0 || ::pipe(print) != 0) {
      fail(__FILE__, __LINE__, "no descriptors left for a job");
    }
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) fail(__FILE__, __LINE__, "fork failed");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(3);
      for (Child& other : children_) {
        closeOf(other.talk);
        closeOf(other.print);
      }
      ::dup2(print[1], 1);
      ::dup2(print[1], 2);
      for (const int fd : {talk[0], print[0], print[1]}) ::close(fd);
      runChild(rank, size, talk[1], body);
    }
    ::close(talk[1]);
    ::close(print[1]);
    Child child;
    child.pid = pid;
    child.talk = talk[0];
    child.print = print[0];
    children_.push_back(std::move(child));
  }

  [[noreturn]] static void runChild(int rank, int size, int fd, const std::function<void(Member&)>& body) {
    std::string why;
    try {
      Member member(rank, size, fd);
      body(member);
    } catch (const Failure& failure) {
      why = failure.what;
    } catch (const std::exception& error) {
      why = std::string("threw: ") + error.what();
    }
    if (!why.empty()) {
      std::printf("rank %d: %s\n", rank, why.c_str());
      std::fflush(nullptr);
      ::_exit(1);
    }
    std::exit(0);  // runs the sanitizers' checks at the end of a process
  }

  // Reads what has come; false when all children have closed both of their ends.
  bool serveOnce() {
    std::vector<pollfd> polled;
    std::vector<Child*> owners;
    for (Child& child : children_) {
      for (const int fd : {child.talk, child.print}) {
        if (fd < 0) continue;
        polled.push_back({fd, POLLIN, 0});
        owners.push_back(&child);
      }
    }
    if (polled.empty()) return false;
    ::poll(polled.data(), polled.size(), 100);
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      Child& child = *owners[i];
      const bool talks = polled[i].fd == child.talk;
      char bytes[4096];
      const ssize_t got = ::read(polled[i].fd, bytes, sizeof bytes);
      if (got <= 0) {
        closeOf(talks ? child.talk : child.print);
        continue;
      }
      (talks ? child.incoming : child.ended.output).append(bytes, static_cast<std::size_t>(got));
      if (talks) parse(child);
    }
    answer();
    return true;
  }

  static void parse(Child& child) {
    constexpr std::size_t kHead = 1 + sizeof(std::uint32_t);
    while (child.incoming.size() >= kHead) {
      std::uint32_t bytes = 0;
      std::memcpy(&bytes, child.incoming.data() + 1, sizeof bytes);
      if (bytes > kJobMessageBytesMax) fail(__FILE__, __LINE__, "a rank sent too long a message to its parent");
      if (child.incoming.size() < kHead + bytes) return;
      const char kind = child.incoming[0];
      const std::string text = child.incoming.substr(kHead, bytes);
      child.incoming.erase(0, kHead + bytes);
      if (kind == 'r') {
        child.ended.reports.push_back(text);
      } else {
        child.waits = true;
        child.given = text;
      }
    }
  }

  void answer() {
    std::string all;
    bool anybody = false;
    for (const Child& child : children_) {
      if (child.talk >= 0 && !child.waits) return;
      anybody |= child.talk >= 0;
      const std::string& given = child.waits ? child.given : std::string();
      const auto bytes = static_cast<std::uint32_t>(given.size());
      all.append(reinterpret_cast<const char*>(&bytes), sizeof bytes).append(given);
    }
    if (!anybody) return;
    for (Child& child : children_) {
      child.waits = false;
      child.given.clear();
      // A rank that has just died is found by its end of file.
      if (child.talk >= 0) (void)!::send(child.talk, all.data(), all.size(), MSG_NOSIGNAL);
    }
  }

  static void reap(Child& child) {
    if (child.pid <= 0) return;
    int status = 0;
    while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
    }
    child.pid = -1;
    child.ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    child.ended.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }

  std::vector<Child> children_;
};

/// Runs the job; fails the test unless every rank ends well, but for `killed`, which must die by SIGKILL.
inline std::vector<Ended> runJob(int size, const std::function<void(Member&)>& body, int killed = -1) {
  const std::vector<Ended> all = Job(size, body).wait();
  std::string why;
  for (int rank = 0; rank < size; ++rank) {
    const Ended& ended = all[static_cast<std::size_t>(rank)];
    if (rank == killed ? ended.signal == SIGKILL : ended.exit_code == 0) continue;
    why += "\n     rank " + std::to_string(rank) + " of " + std::to_string(size) + " ended with exit status " +
           std::to_string(ended.exit_code) + ", signal " + std::to_string(ended.signal) + ": " + ended.output;
  }
  if (!why.empty()) fail(__FILE__, __LINE__, "a job ended badly:" + why);
  return all;
}

inline std::string encodeEndpoint(const Endpoint& endpoint) {
  return std::to_string(endpoint.incarnation) + "|" + std::to_string(endpoint.pid) + "|" + endpoint.address + "|" +
         endpoint.socket + "|" + endpoint.machine_id;
}

inline Endpoint decodeEndpoint(const std::string& text) {
  std::vector<std::string> fields(1);
  for (const char letter : text) {
    if (letter == '|' && fields.size() < 5) {
      fields.emplace_back();
    } else {
      fields.back() += letter;
    }
  }
  if (fields.size() != 5) fail(__FILE__, __LINE__, "not an endpoint: " + text);
  return {std::stoull(fields[0]), fields[4], fields[2], fields[3], std::stol(fields[1])};
}

/// Makes this process a global rank of the job and tells it where the others are.
inline std::shared_ptr<Runtime> joinRuntime(Member& member, const Settings& settings) {
  auto runtime = Runtime::create(member.rank(), {"test", "secret", "constants"}, settings, Mode::kLive);
  const auto texts = member.exchange(encodeEndpoint(runtime->endpoint()));
  std::map<int, Endpoint> endpoints;
  for (int rank = 0; rank < member.size(); ++rank) {
    const std::string& text = texts[static_cast<std::size_t>(rank)];
    if (!text.empty()) endpoints[rank] = decodeEndpoint(text);
  }
  runtime->addEndpoints(endpoints);
  return runtime;
}

}  // namespace trainmover::check
