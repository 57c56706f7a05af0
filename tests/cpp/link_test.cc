// Runs the conformance suite on every kind of link there is, and tests what is particular to one.
#include "link_conformance.h"

namespace trainmover::check {
namespace {

const bool g_registered = [] {
  for (const LinkKind kind : kLinkKinds) registerLinkConformance(kind);
  return true;
}();

TEST(shm_notify_rings_once_for_each_change_that_matters) {
  LinkPair pair(LinkKind::kShm);
  const IoSlice part{"abc", 3};
  pair.a.link().notify();
  CHECK_EQ(pair.a.rings(), 0);
  CHECK_EQ(pair.a.link().write(&part, 1), 3);
  CHECK_EQ(pair.a.link().write(&part, 1), 3);
  pair.a.link().notify();
  pair.a.link().notify();
  CHECK_EQ(pair.a.rings(), 1);
  // Reading matters to the writer only when it found no room.
  char bytes[8];
  CHECK_EQ(pair.b.link().read(bytes, sizeof bytes), 6);
  pair.b.link().notify();
  CHECK_EQ(pair.b.rings(), 0);
  StreamWriter writer(pair.a.link(), conformance::kMuch, 1, 1);
  fillUp(pair.a, writer);
  CHECK_EQ(pair.b.link().read(bytes, sizeof bytes), sizeof bytes);
  pair.b.link().notify();
  CHECK_EQ(pair.b.rings(), 1);
  CHECK_EQ(pair.b.link().read(bytes, sizeof bytes), sizeof bytes);
  pair.b.link().notify();
  CHECK_EQ(pair.b.rings(), 1);
}

TEST(shm_ring_has_room_for_exactly_its_size) {
  LinkPair pair(LinkKind::kShm);
  const std::vector<unsigned char> bytes(shm::kRingBytes + 1, 7);
  const IoSlice part{bytes.data(), bytes.size()};
  CHECK_EQ(pair.a.link().write(&part, 1), shm::kRingBytes);
  CHECK_EQ(pair.a.link().write(&part, 1), 0);
}

TEST(shm_closing_rings_at_the_other_end) {
  LinkPair pair(LinkKind::kShm);
  bool closed = false;
  std::thread closer([&] { pair.a.close(); });
  closed = endsHere(pair.b);
  closer.join();
  CHECK(closed);
}

TEST(own_memory_may_be_read_and_that_of_nobody_may_not) {
  const std::uint64_t word = 12345;
  const auto address = reinterpret_cast<std::uint64_t>(&word);
  CHECK(shm::mayReadMemoryOf(::getpid(), address, word));
  CHECK(!shm::mayReadMemoryOf(::getpid(), address, word + 1));
  // Process 2^22 + 1 is beyond what a kernel gives out.
  CHECK(!shm::mayReadMemoryOf((1 << 22) + 1, address, word));
}

TEST(tcp_link_to_a_killed_process_closes) {
  TalkingPair talk;
  runJob(
      2,
      [talk](Member& member) {
        const bool creator = member.rank() == 0;
        LinkEnd end(LinkKind::kTcp, creator, talk.fds[creator ? 0 : 1]);
        end.connect();
        member.meet();
        if (!creator) ::kill(::getpid(), SIGKILL);
        CHECK(endsHere(end));
      },
      1);
  for (const int fd : talk.fds) ::close(fd);
}

}  // namespace
}  // namespace trainmover::check
