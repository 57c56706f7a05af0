// The shared segment of a group: joining, sides, arrivals, reading each other's memory. Several ranks in one process,
// stepped one by one so that every order can be tried, and then in processes of their own at full speed.
#include "flat/group.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <random>

#include "job.h"
#include "transport/link_closed.h"

namespace trainmover::check {
namespace {

using flat::Group;
using flat::GroupConfig;
using flat::Layout;

/// `size` ranks in this process.
struct Ranks {
  explicit Ranks(int size, int without_cross_memory = -1) {
    Descriptor memory;
    Mapping first = Mapping::create("test-group", Layout(size).bytes(), memory);
    for (int rank = 0; rank < size; ++rank) {
      bells.push_back(std::make_unique<Doorbell>());
    }
    for (int rank = 0; rank < size; ++rank) {
      GroupConfig config{size, rank, rank != without_cross_memory, {}};
      for (int other = 0; other < size; ++other) {
        const Doorbell& bell = *bells[static_cast<std::size_t>(other)];
        config.doorbells.push_back(
            other == rank ? nullptr : std::make_shared<PeerDoorbell>(bell.memory(), Descriptor(::dup(bell.event()))));
      }
      groups.push_back(std::make_unique<Group>(
          rank == 0 ? std::move(first) : Mapping::attach(memory, Layout(size).bytes()), std::move(config), traffic));
    }
  }
  void join() {
    for (int round = 0; round < 3; ++round) {
      for (auto& group : groups) group->join();
    }
    for (auto& group : groups) CHECK(group->join());
  }
  Traffic traffic;
  Group& operator[](int rank) { return *groups[static_cast<std::size_t>(rank)]; }
  /// Announces a sleeper on each; rung(r) says whether it was woken since.
  void sleepAll() {
    for (auto& bell : bells) bell->announce(Sleeper::kFutex);
    seen.clear();
    for (auto& bell : bells) seen.push_back(bell->rings());
  }
  bool rung(int rank) const {
    return bells[static_cast<std::size_t>(rank)]->rings() != seen[static_cast<std::size_t>(rank)];
  }

  std::vector<std::unique_ptr<Doorbell>> bells;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::uint32_t> seen;
};

TEST(group_is_joined_when_all_have_come_and_not_before) {
  Ranks ranks(3);
  for (int i = 0; i < 3; ++i) {
    CHECK(!ranks[0].join());
    CHECK(!ranks[1].join());
  }
  ranks.sleepAll();
  CHECK(!ranks[2].join());  // the others still have to try its memory
  CHECK(ranks.rung(0) && ranks.rung(1));
  CHECK(!ranks[0].join());
  ranks.sleepAll();
  CHECK(ranks[1].join());
  CHECK(ranks.rung(0) && ranks.rung(2));
  CHECK(ranks[0].join());
  CHECK(ranks[2].join());
  for (int rank = 0; rank < 3; ++rank) CHECK(ranks[rank].crossMemory());
}

TEST(one_rank_without_cross_memory_leaves_none_with_it) {
  for (int denied = 0; denied < 3; ++denied) {
    Ranks ranks(3, denied);
    ranks.join();
    for (int rank = 0; rank < 3; ++rank) CHECK(!ranks[rank].crossMemory());
  }
}

TEST(stage_is_complete_when_all_have_arrived_and_the_last_wakes_the_others) {
  Ranks ranks(3);
  ranks.join();
  for (std::uint64_t sequence = 1; sequence <= 6; ++sequence) {
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(ranks[rank].sideFree(sequence));
      ranks[rank].expect(sequence, 0, 3);
    }
    // Each is the last once.
    const int last = static_cast<int>(sequence % 3);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != last) ranks[rank].arrive(sequence, 0);
      CHECK(!ranks[rank].arrived(sequence, 0));
    }
    ranks.sleepAll();
    ranks[last].arrive(sequence, 0);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(ranks[rank].arrived(sequence, 0));
      CHECK_EQ(ranks.rung(rank), rank != last);
      ranks[rank].leave(sequence);
    }
  }
}

TEST(side_is_free_again_when_all_have_left_it_and_who_waits_is_woken) {
  Ranks ranks(3);
  ranks.join();
  for (int rank = 0; rank < 3; ++rank) CHECK(ranks[rank].sideFree(1) && ranks[rank].sideFree(2));
  for (const std::uint64_t sequence : {1, 2}) {
    ranks[0].leave(sequence);
    ranks[1].leave(sequence);
  }
  ranks[2].leave(1);
  CHECK(ranks[0].sideFree(3));
  CHECK(!ranks[0].sideFree(4));  // rank 2 may still read the other side
  ranks.sleepAll();
  ranks[2].leave(2);
  CHECK(ranks.rung(0));
  CHECK(ranks[0].sideFree(4));
  CHECK(ranks[1].sideFree(4));
  // Nobody waits: nobody is woken.
  ranks.sleepAll();
  ranks[2].leave(3);
  CHECK(!ranks.rung(0) && !ranks.rung(1));
}

TEST(sides_slots_tables_and_offers_of_ranks_are_apart) {
  Ranks ranks(4);
  ranks.join();
  for (std::uint64_t sequence = 1; sequence <= 2; ++sequence) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto mark = static_cast<unsigned char>(sequence * 16 + static_cast<unsigned>(rank));
      std::memset(ranks[rank].slot(sequence, rank), mark, flat::kSlotBytes);
      for (int other = 0; other < 4; ++other) ranks[rank].table(sequence, rank)[other] = {mark, sequence};
      ranks[rank].offer(sequence, rank).bytes = mark;
    }
  }
  for (std::uint64_t sequence = 1; sequence <= 2; ++sequence) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto mark = static_cast<unsigned char>(sequence * 16 + static_cast<unsigned>(rank));
      const Group& reader = ranks[3 - rank];
      unsigned char* slot = const_cast<Group&>(reader).slot(sequence, rank);
      CHECK_EQ(slot[0], mark);
      CHECK_EQ(slot[flat::kSlotBytes - 1], mark);
      for (int other = 0; other < 4; ++other) {
        CHECK_EQ(const_cast<Group&>(reader).table(sequence, rank)[other].address, mark);
      }
      CHECK_EQ(const_cast<Group&>(reader).offer(sequence, rank).bytes, mark);
    }
  }
}

TEST(memory_of_a_rank_that_has_given_up_is_not_confirmed) {
  Ranks ranks(2);
  ranks.join();
  const std::vector<int> memory(100'000, 5);
  std::vector<int> copy(100'000);
  ranks[1].read(0, reinterpret_cast<std::uint64_t>(memory.data()), copy.data(), copy.size() * sizeof(int));
  ranks[1].confirm(0);
  CHECK(copy == memory);
  CHECK_THROWS(ranks[1].read(0, 64, copy.data(), 8), LinkClosed);
  ranks.sleepAll();
  ranks[0].withdraw();
  CHECK(ranks.rung(1));
  // What can be read may be anything by now.
  ranks[1].read(0, reinterpret_cast<std::uint64_t>(memory.data()), copy.data(), 8);
  CHECK_THROWS(ranks[1].confirm(0), LinkClosed);
}

// Every rank writes, all arrive, every rank reads all, all leave; at full speed, with no doorbells but yielding.
TEST(processes_see_what_all_have_written_before_they_arrived_and_nothing_later) {
  constexpr int kSize = 4;
  constexpr std::uint64_t kOperations = 2'000;
  const int fd = ::memfd_create("test-group", MFD_ALLOW_SEALING);
  CHECK(fd >= 0);
  CHECK_EQ(::ftruncate(fd, static_cast<off_t>(Layout(kSize).bytes())), 0);
  CHECK_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  runJob(kSize, [fd](Member& member) {
    const Descriptor memory(fd);
    Traffic traffic;
    Group group(Mapping::attach(memory, Layout(kSize).bytes()),
                {kSize, member.rank(), true, std::vector<std::shared_ptr<PeerDoorbell>>(kSize)}, traffic);
    const std::uint64_t deadline_ms = monotonicMs() + 40'000;
    const auto until = [&](auto condition) {
      while (!condition()) {
        CHECK(monotonicMs() < deadline_ms);
        ::sched_yield();
      }
    };
    until([&] { return group.join(); });
    std::mt19937 random(static_cast<std::uint32_t>(member.rank()));
    std::vector<std::uint64_t> own(64);
    for (std::uint64_t sequence = 1; sequence <= kOperations; ++sequence) {
      until([&] { return group.sideFree(sequence); });
      group.expect(sequence, 0, kSize);
      group.expect(sequence, 1, kSize);
      auto* slot = reinterpret_cast<std::uint64_t*>(group.slot(sequence, member.rank()));
      for (std::size_t i = 0; i < 64; ++i) slot[i] = own[i] = sequence * 1000 + static_cast<unsigned>(member.rank());
      group.offer(sequence, member.rank()).address = reinterpret_cast<std::uint64_t>(own.data());
      group.arrive(sequence, 0);
      until([&] { return group.arrived(sequence, 0); });
      if (random() % 16 == 0) ::sched_yield();
      for (int other = 0; other < kSize; ++other) {
        const std::uint64_t expected = sequence * 1000 + static_cast<unsigned>(other);
        const auto* theirs = reinterpret_cast<const std::uint64_t*>(group.slot(sequence, other));
        for (std::size_t i = 0; i < 64; i += 21) CHECK_EQ(theirs[i], expected);
        std::uint64_t word = 0;
        group.read(other, group.offer(sequence, other).address + 63 * 8, &word, sizeof word);
        CHECK_EQ(word, expected);
      }
      // Their own memory is in use until all have read it.
      group.arrive(sequence, 1);
      until([&] { return group.arrived(sequence, 1); });
      group.leave(sequence);
    }
    member.meet();
  });
  ::close(fd);
}

}  // namespace
}  // namespace trainmover::check
