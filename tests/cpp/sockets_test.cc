// Listening, connecting and passing descriptors, and what forked helpers of a rank hold open: nothing.
#include "runtime/sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/errors.h"
#include "job.h"

namespace trainmover::check {
namespace {

constexpr int kLimitMs = 10'000;

bool comes(int fd, short events) {
  pollfd polled{fd, events, 0};
  return ::poll(&polled, 1, kLimitMs) == 1;
}

struct Pair {
  explicit Pair(bool local) {
    std::string where = "trainmover-test-" + std::to_string(::getpid());
    listener = local ? listenUnix(where) : listenTcp("127.0.0.1", where);
    int error = 0;
    a = local ? connectUnix(where, error) : connectTcp(where, error);
    CHECK_EQ(error, 0);
    CHECK(comes(listener.get(), POLLIN));
    b = acceptOn(listener);
    CHECK(static_cast<bool>(b));
    CHECK(comes(a.get(), POLLOUT));
    CHECK_EQ(connectError(a), 0);
  }
  Descriptor listener, a, b;
};

TEST(connections_of_both_kinds_carry_bytes_and_nothing_blocks) {
  for (const bool local : {true, false}) {
    Pair pair(local);
    CHECK(!acceptOn(pair.listener));
    for (const int fd : {pair.a.get(), pair.b.get(), pair.listener.get()}) {
      CHECK((::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
      CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    }
    char bytes[8] = {};
    bool ended = true;
    std::vector<Descriptor> received;
    CHECK_EQ(peekWith(pair.b.get(), bytes, sizeof bytes, ended), 0);
    CHECK(!ended);
    CHECK_EQ(receiveWith(pair.b.get(), bytes, sizeof bytes, received, 1), 0);
    CHECK(sendWith(pair.a.get(), "hello", 5, {}));
    CHECK(comes(pair.b.get(), POLLIN));
    for (int i = 0; i < 2; ++i) CHECK_EQ(peekWith(pair.b.get(), bytes, sizeof bytes, ended), 5);
    CHECK_EQ(receiveWith(pair.b.get(), bytes, 2, received, 1), 2);
    CHECK_EQ(receiveWith(pair.b.get(), bytes, sizeof bytes, received, 1), 3);
    CHECK_EQ(std::string(bytes, 3), std::string("llo"));
    CHECK(received.empty());
    pair.a.reset();
    CHECK(comes(pair.b.get(), POLLIN));
    CHECK_EQ(peekWith(pair.b.get(), bytes, sizeof bytes, ended), 0);
    CHECK(ended);
    CHECK_EQ(receiveWith(pair.b.get(), bytes, sizeof bytes, received, 1), -1);
    CHECK(!sendWith(pair.b.get(), "x", 1, {}) || !local);
  }
}

TEST(sending_to_a_socket_that_is_full_says_so) {
  Pair pair(true);
  const std::vector<char> bytes(100'000);
  int sent = 0;
  while (sendWith(pair.a.get(), bytes.data(), bytes.size(), {})) CHECK(++sent < 1000);
}

TEST(listeners_tell_their_port_and_refuse_what_is_no_address) {
  std::string bound;
  const Descriptor four = listenTcp("127.0.0.1", bound);
  CHECK_EQ(bound.rfind("127.0.0.1:", 0), 0);
  CHECK(std::stoi(bound.substr(10)) > 0);
  for (const char* wrong : {"", "localhost", "127.0.0.1:80", "300.0.0.1", "::g"}) {
    CHECK_THROWS(listenTcp(wrong, bound), TransportError);
  }
  // Not an address of this machine (documentation range).
  CHECK_THROWS(listenTcp("192.0.2.1", bound), TransportError);
}

TEST(ipv6_works_where_the_machine_has_it) {
  std::string bound;
  Descriptor listener;
  try {
    listener = listenTcp("::1", bound);
  } catch (const TransportError&) {
    std::printf("     no IPv6 on this machine: not tested\n");
    return;
  }
  int error = 0;
  const Descriptor socket = connectTcp(bound, error);
  CHECK_EQ(error, 0);
  CHECK(comes(listener.get(), POLLIN));
  CHECK(static_cast<bool>(acceptOn(listener)));
}

TEST(abstract_name_is_taken_once_and_free_again_afterwards) {
  const std::string name = "trainmover-test-name-" + std::to_string(::getpid());
  Descriptor listener = listenUnix(name);
  CHECK_THROWS(listenUnix(name), TransportError);
  listener.reset();
  listener = listenUnix(name);
}

TEST(connecting_to_nobody_is_told) {
  std::string bound;
  Descriptor listener = listenTcp("127.0.0.1", bound);
  listener.reset();
  int error = 0;
  const Descriptor socket = connectTcp(bound, error);
  if (socket) {
    CHECK(comes(socket.get(), POLLOUT));
    error = connectError(socket);
  }
  CHECK_EQ(error, ECONNREFUSED);
  error = 0;
  CHECK(!connectUnix("trainmover-test-nobody", error));
  CHECK_EQ(error, ECONNREFUSED);
}

TEST(addresses_that_make_no_sense_are_refused) {
  for (const char* wrong : {"", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:1234567",
                            "host:80", "127.0.0.1:x"}) {
    int error = 0;
    CHECK(!connectTcp(wrong, error));
    CHECK_EQ(error, EINVAL);
  }
}

TEST(descriptors_are_passed_and_more_than_expected_are_refused_and_closed) {
  Pair pair(true);
  int pipe_ends[2];
  CHECK_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  Descriptor read_end(pipe_ends[0]), write_end(pipe_ends[1]);
  CHECK(sendWith(pair.a.get(), "x", 1, {write_end.get(), write_end.get()}));
  char byte = 0;
  {
    std::vector<Descriptor> received;
    CHECK(comes(pair.b.get(), POLLIN));
    bool ended = false;
    CHECK_EQ(peekWith(pair.b.get(), &byte, 1, ended), 1);  // takes none of them
    CHECK_EQ(receiveWith(pair.b.get(), &byte, 1, received, 2), 1);
    CHECK_EQ(received.size(), 2);
    CHECK((::fcntl(received[1].get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQ(::write(received[1].get(), "y", 1), 1);
    CHECK_EQ(::read(read_end.get(), &byte, 1), 1);
    CHECK_EQ(byte, 'y');
  }
  CHECK(sendWith(pair.a.get(), "x", 1, {write_end.get(), write_end.get()}));
  CHECK(comes(pair.b.get(), POLLIN));
  {
    std::vector<Descriptor> received;
    CHECK_EQ(receiveWith(pair.b.get(), &byte, 1, received, 1), -1);
  }
  // All copies are closed, or the pipe would not end.
  write_end.reset();
  CHECK(comes(read_end.get(), POLLIN));
  CHECK_EQ(::read(read_end.get(), &byte, 1), 0);
}

TEST(forked_helper_keeps_no_connection_of_its_rank_open) {
  Pair pair(false);
  int gate[2];
  CHECK_EQ(::pipe2(gate, O_CLOEXEC), 0);
  const pid_t helper = ::fork();
  CHECK(helper >= 0);
  if (helper == 0) {
    char byte = 0;
    ::close(gate[1]);
    const bool closed = ::fcntl(pair.a.get(), F_GETFD) < 0 && ::fcntl(pair.listener.get(), F_GETFD) < 0;
    (void)!::read(gate[0], &byte, 1);  // until the parent has seen what it wants to see, or is gone
    ::_exit(closed ? 0 : 1);
  }
  ::close(gate[0]);
  pair.a.reset();
  const bool came = comes(pair.b.get(), POLLIN);
  char byte = 0;
  bool ended = false;
  peekWith(pair.b.get(), &byte, 1, ended);
  ::close(gate[1]);
  int status = 0;
  CHECK_EQ(::waitpid(helper, &status, 0), helper);
  CHECK(came && ended);
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace trainmover::check
