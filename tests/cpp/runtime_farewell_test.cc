// Ranks that leave on purpose while others still work: what they sent still arrives, who needs nothing of them goes on
// undisturbed, and who does need them is told.
#include <thread>

#include "runtime_calls.h"

namespace trainmover {
namespace {

using namespace check;

constexpr int kOffenceMs = 600;  // twice as long as a closed link may stay unexplained

// Rank 1 has done its part of a gather and leaves; the root still waits for rank 2, which comes late.
void leaverOfAGather(Path path, std::size_t count) {
  runJob(3, [path, count](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 3));
    auto group = world(*runtime, 3);
    checkedAllReduce(*group, 100, 1);
    std::vector<std::int32_t> own(count, member.rank() + 1);
    std::vector<std::vector<std::int32_t>> all(3, std::vector<std::int32_t>(member.rank() == 0 ? count : 0));
    std::vector<Buffer> outputs;
    if (member.rank() == 0) {
      for (auto& one : all) outputs.push_back(bufferOf(one));
    }
    member.meet();
    const auto gather = [&] { return start(*group, CollectiveKind::kGather, {bufferOf(own)}, outputs); };
    if (member.rank() == 2) {
      // Rank 1 has ended when the others meet without it. Then the root has time to take offence, and must not.
      member.meet();
      ::poll(nullptr, 0, kOffenceMs);
      gather()->wait();
    } else if (member.rank() == 1) {
      gather()->wait();
    } else {
      auto operation = gather();
      std::string found;
      std::thread driver([&] { found = outcome(operation); });
      member.meet();
      driver.join();
      CHECK_EQ(found, std::string("ok"));
      for (int rank = 0; rank < 3; ++rank) {
        for (const auto value : all[static_cast<std::size_t>(rank)]) CHECK_EQ(value, rank + 1);
      }
      CHECK(!runtime->aborted());
    }
    group->close();
    runtime->shutdown();
  });
}
TEST(leaver_that_has_done_its_part_disturbs_no_gather_over_shm) { leaverOfAGather(Path::kShm, 1000); }
TEST(leaver_that_has_done_its_part_disturbs_no_gather_over_shm_without_cross_memory) {
  leaverOfAGather(Path::kShmWithoutCrossMemory, 1000);
}
TEST(leaver_that_has_done_its_part_disturbs_no_gather_over_tcp) { leaverOfAGather(Path::kTcp, 1000); }

// Rank 1 sends and leaves; rank 0 has asked before, or asks only afterwards.
void sentBeforeLeaving(Path path, std::size_t messages, std::size_t bytes, bool asks_before) {
  runJob(2, [=](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 2));
    auto group = world(*runtime, 2);
    checkedAllReduce(*group, 100, 1);
    std::vector<std::vector<unsigned char>> all(messages, std::vector<unsigned char>(bytes));
    std::vector<std::shared_ptr<Operation>> operations;
    const auto startAll = [&] {
      for (std::size_t i = 0; i < messages; ++i) {
        if (member.rank() == 1) all[i].assign(bytes, static_cast<unsigned char>(i + 1));
        operations.push_back(member.rank() == 1 ? group->send(bufferOf(all[i]), 0, 1, kCallLimit)
                                                : group->receive(bufferOf(all[i]), 1, 1, kCallLimit));
      }
    };
    member.meet();
    if (member.rank() == 1) {
      startAll();
      for (auto& operation : operations) operation->wait();
      group->close();
      runtime->shutdown();
      return;
    }
    if (asks_before) startAll();
    member.meet();  // rank 1 has ended
    if (!asks_before) startAll();
    for (std::size_t i = 0; i < messages; ++i) {
      operations[i]->wait();
      CHECK_EQ(all[i].front(), static_cast<unsigned char>(i + 1));
      CHECK_EQ(all[i].back(), static_cast<unsigned char>(i + 1));
    }
    runtime->shutdown();
  });
}
TEST(what_was_sent_before_leaving_arrives_where_it_was_asked_for) {
  for (const Path path : kPaths) {
    sentBeforeLeaving(path, 1, 100, true);
    sentBeforeLeaving(path, 30, 16 << 10, true);
    sentBeforeLeaving(path, 1, 8 << 20, true);
  }
}
TEST(what_was_sent_before_leaving_arrives_where_it_is_asked_for_later_over_shm) {
  sentBeforeLeaving(Path::kShm, 1, 100, false);
  sentBeforeLeaving(Path::kShm, 10, 16 << 10, false);
}
TEST(what_was_sent_before_leaving_arrives_where_it_is_asked_for_later_over_tcp) {
  sentBeforeLeaving(Path::kTcp, 1, 100, false);
  sentBeforeLeaving(Path::kTcp, 30, 16 << 10, false);
}

void anySourceOutlivesLeaver(Path path) {
  runJob(3, [path](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 3));
    auto group = world(*runtime, 3);
    std::vector<int> value(1, member.rank());
    std::vector<int> got(1, -1);
    if (member.rank() == 0) {
      group->receive(bufferOf(got), 1, 1, kCallLimit)->wait();
      auto any = group->receive(bufferOf(got), kAnySource, 2, kCallLimit);
      std::string found;
      std::thread driver([&] { found = outcome(any); });
      member.meet();
      member.meet();
      driver.join();
      CHECK_EQ(found, std::string("ok"));
      CHECK_EQ(any->sourceRank(), 2);
      CHECK_EQ(got[0], 2);
    } else if (member.rank() == 1) {
      group->send(bufferOf(value), 0, 1, kCallLimit)->wait();
      member.meet();
    } else {
      member.meet();
      member.meet();  // rank 1 has ended
      ::poll(nullptr, 0, kOffenceMs);
      group->send(bufferOf(value), 0, 2, kCallLimit)->wait();
    }
    group->close();
    runtime->shutdown();
  });
}
TEST(receive_from_any_source_outlives_a_leaver_over_shm) { anySourceOutlivesLeaver(Path::kShm); }
TEST(receive_from_any_source_outlives_a_leaver_over_tcp) { anySourceOutlivesLeaver(Path::kTcp); }

TEST(whoever_needs_a_leaver_loses_it) {
  for (const Path path : kPaths) {
    runJob(2, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 2));
      auto group = world(*runtime, 2);
      checkedAllReduce(*group, 100, 1);
      member.meet();
      if (member.rank() == 0) {
        std::vector<float> values(10);
        CHECK_THROWS(group->receive(bufferOf(values), 1, 1, kCallLimit)->wait(), PeerLost);
      }
      runtime->shutdown();
    });
  }
}

TEST(communicators_that_are_closed_one_after_the_other_disturb_no_one) {
  for (const Path path : kPaths) {
    runJob(3, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 3));
      auto group = world(*runtime, 3);
      for (int round = 0; round < 10; ++round) {
        auto passing = world(*runtime, 3, "passing " + std::to_string(round));
        checkedAllReduce(*passing, round % 2 == 0 ? 10 : 200'000, round + 1);
        passing->close();  // the others may still be at it
        passing.reset();
        checkedAllReduce(*group, 100, round + 1);
      }
      runtime->shutdown();
    });
  }
}

}  // namespace
}  // namespace trainmover
