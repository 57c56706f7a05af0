// What the runtime does when ranks abort, die, fall silent, leave or resume: who gets which error, how soon, and that
// everything works again afterwards and nothing is left over.
#include <dirent.h>
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "runtime_calls.h"

namespace trainmover {
namespace {

using namespace check;

int openDescriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

double processorSeconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + time.tv_usec / 1e6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// --- aborts ---------------------------------------------------------------------------------------------------------

// Rank 0 blocks in an operation that rank 1 never joins, until another thread of rank 0 aborts.
void abortFreesBlockedRank(Path path) {
  const auto ended = runJob(2, [path](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 2));
    auto group = world(*runtime, 2);
    checkedAllReduce(*group, 1000, 1);
    double worst_ms = 0;
    for (Generation generation = 2; generation < 12; ++generation) {
      member.meet();
      if (member.rank() == 0) {
        std::vector<float> values(300'000);
        auto operation = generation % 2 == 0 ? start(*group, CollectiveKind::kAllReduce, {}, {bufferOf(values)})
                                             : group->receive(bufferOf(values), 1, 7, kCallLimit);
        std::atomic<std::uint64_t> freed_ns{0};
        std::string found;
        std::thread blocked([&] {
          found = outcome(operation);
          freed_ns = monotonicNs();
        });
        // Long enough for the thread to have gone to sleep in some rounds, not in others.
        ::poll(nullptr, 0, static_cast<int>(generation));
        const std::uint64_t aborted_ns = monotonicNs();
        runtime->abortCollectives(-1, "a test");
        blocked.join();
        CHECK_EQ(found, std::string("aborted -1"));
        worst_ms = std::max(worst_ms, static_cast<double>(freed_ns.load() - aborted_ns) / 1e6);
      } else {
        eventually([&] { return runtime->aborted(); }, "the other rank's abort is heard");
      }
      member.meet();
      runtime->resume(generation);
      checkedAllReduce(*group, 1000, static_cast<int>(generation));
    }
    if (member.rank() == 0) member.report(std::to_string(worst_ms));
    runtime->shutdown();
  });
  const double worst_ms = std::stod(ended[0].reports.at(0));
  std::printf("     %s: freed at most %.2f ms after the abort\n", nameOf(path), worst_ms);
  CHECK(worst_ms < 2000);
}
TEST(abort_from_another_thread_frees_a_blocked_rank_over_shm) { abortFreesBlockedRank(Path::kShm); }
TEST(abort_from_another_thread_frees_a_blocked_rank_over_shm_without_cross_memory) {
  abortFreesBlockedRank(Path::kShmWithoutCrossMemory);
}
TEST(abort_from_another_thread_frees_a_blocked_rank_over_tcp) { abortFreesBlockedRank(Path::kTcp); }

void resumeAtOnce(Path path) {
  runJob(2, [path](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 2));
    auto group = world(*runtime, 2);
    checkedAllReduce(*group, 1000, 1);
    member.meet();
    for (Generation generation = 2; generation < 32; ++generation) {
      std::vector<float> values(1000);
      std::shared_ptr<Operation> left_over;
      try {
        left_over = start(*group, CollectiveKind::kAllReduce, {}, {bufferOf(values)});
      } catch (const CollectiveAborted& error) {
        CHECK_EQ(error.generation(), generation - 1);  // the other rank was faster
      }
      // No wait in between: what the abort still has to do must not touch the new generation.
      runtime->abortCollectives(-1, "a test");
      runtime->resume(generation);
      checkedAllReduce(*group, 1000, static_cast<int>(generation));
      member.meet();
    }
    runtime->shutdown();
  });
}
TEST(resume_directly_after_an_abort_does_not_lose_operations_of_the_new_generation_over_shm) {
  resumeAtOnce(Path::kShm);
}
TEST(resume_directly_after_an_abort_does_not_lose_operations_of_the_new_generation_over_tcp) {
  resumeAtOnce(Path::kTcp);
}

TEST(calls_of_an_aborted_generation_fail_at_once_and_generations_only_grow) {
  runJob(2, [](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(Path::kShm, 2));
    auto group = world(*runtime, 2);
    barrier(*group);
    member.meet();
    runtime->abortCollectives(1, "a test");
    CHECK_THROWS(barrier(*group), CollectiveAborted);
    CHECK_THROWS(group->send({}, 1 - member.rank(), 0, kCallLimit), CollectiveAborted);
    CHECK_THROWS(runtime->resume(1), SwitchError);
    CHECK_THROWS(runtime->resume(0), SwitchError);
    CHECK(runtime->aborted());
    member.meet();
    runtime->resume(7);
    CHECK_EQ(runtime->generation(), 7);
    CHECK_THROWS(runtime->resume(7), SwitchError);
    barrier(*group);
    runtime->shutdown();
  });
}

// The same ranks, aborted and resumed again and again, hold as much as at first.
void nothingLeaks(Path path) {
  runJob(3, [path](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 3));
    auto group = world(*runtime, 3);
    MemoryStats before;
    int descriptors_before = 0;
    for (Generation generation = 2; generation < 22; ++generation) {
      checkedAllReduce(*group, 50'000, 3);
      std::vector<char> bytes(100'000);
      std::vector<char> others(100'000);
      auto sent = group->send(bufferOf(bytes), (member.rank() + 1) % 3, 1, kCallLimit);
      group->receive(bufferOf(others), (member.rank() + 2) % 3, 1, kCallLimit)->wait();
      sent->wait();
      // One that nobody asked for, one that waits for ever.
      auto unasked = group->send({bytes.data(), 100}, (member.rank() + 1) % 3, 2, kCallLimit);
      auto unmet = group->receive(bufferOf(others), (member.rank() + 1) % 3, 3, kCallLimit);
      member.meet();
      const MemoryStats now = runtime->memoryStats();
      const int descriptors = openDescriptors();
      if (generation == 4) {
        before = now;
        descriptors_before = descriptors;
      } else if (generation > 4) {
        CHECK_EQ(now.shared_segments, before.shared_segments);
        CHECK_EQ(now.link_buffers, before.link_buffers);
        CHECK_EQ(now.scratch, before.scratch);
        CHECK(now.unexpected_messages <= 300);
        // A connection that is on its way out may still be open.
        CHECK(std::abs(descriptors - descriptors_before) <= 2);
      }
      member.meet();
      runtime->abortCollectives(-1, "a test");
      CHECK_EQ(outcome(unmet), std::string("aborted -1"));
      member.meet();
      runtime->resume(generation);
    }
    runtime->shutdown();
  });
}
TEST(twenty_aborts_and_resumes_leak_nothing_over_shm) { nothingLeaks(Path::kShm); }
TEST(twenty_aborts_and_resumes_leak_nothing_over_shm_without_cross_memory) {
  nothingLeaks(Path::kShmWithoutCrossMemory);
}
TEST(twenty_aborts_and_resumes_leak_nothing_over_tcp) { nothingLeaks(Path::kTcp); }

// --- deaths ---------------------------------------------------------------------------------------------------------

// Rank 3 of four dies. Rank 0 waits for it directly, rank 1 for rank 2, and rank 2 for nobody.
void killedPeer(Path path) {
  runJob(
      4,
      [path](Member& member) {
        auto runtime = joinRuntime(member, settingsFor(path, 4));
        auto group = world(*runtime, 4);
        checkedAllReduce(*group, 5000, 1);
        std::vector<float> values(100'000);
        std::shared_ptr<Operation> operation;
        if (member.rank() == 0) operation = group->receive(bufferOf(values), 3, 1, kCallLimit);
        if (member.rank() == 1) operation = group->receive(bufferOf(values), 2, 1, kCallLimit);
        member.meet();
        if (member.rank() == 3) ::kill(::getpid(), SIGKILL);
        if (member.rank() == 0) CHECK_EQ(outcome(operation), std::string("lost 3"));
        if (member.rank() == 1) CHECK_EQ(outcome(operation), std::string("aborted 3"));
        eventually([&] { return runtime->aborted(); }, "the death is heard");
        CHECK_THROWS(barrier(*group), CollectiveAborted);
        member.meet();
        // The rest goes on without it, in a smaller group.
        runtime->resume(2);
        auto rest = runtime->createCommunicator("rest", {0, 1, 2}, kCallLimit);
        checkedAllReduce(*rest, 50'000, 2);
        runtime->shutdown();
      },
      3);
}
TEST(killed_peer_is_lost_to_direct_waiters_and_named_to_others_over_shm) { killedPeer(Path::kShm); }
TEST(killed_peer_is_lost_to_direct_waiters_and_named_to_others_over_shm_without_cross_memory) {
  killedPeer(Path::kShmWithoutCrossMemory);
}
TEST(killed_peer_is_lost_to_direct_waiters_and_named_to_others_over_tcp) { killedPeer(Path::kTcp); }

void killedInCollective(Path path, CollectiveKind kind) {
  runJob(
      3,
      [path, kind](Member& member) {
        auto runtime = joinRuntime(member, settingsFor(path, 3));
        auto group = world(*runtime, 3);
        checkedAllReduce(*group, 500'000, 1);
        member.meet();
        if (member.rank() == 2) ::kill(::getpid(), SIGKILL);
        std::vector<float> values(1'000'000);
        std::shared_ptr<Operation> operation;
        try {
          operation = kind == CollectiveKind::kBarrier ? start(*group, kind, {}, {})
                                                       : start(*group, kind, {}, {bufferOf(values)});
        } catch (const CollectiveAborted& error) {
          CHECK_EQ(error.culprit(), 2);
        }
        if (operation) {
          const std::string found = outcome(operation);
          if (found != "lost 2" && found != "aborted 2") fail(__FILE__, __LINE__, "the outcome is: " + found);
        }
        runtime->shutdown();
      },
      2);
}
TEST(death_within_a_collective_names_the_dead_over_every_transport) {
  for (const Path path : kPaths) {
    killedInCollective(path, CollectiveKind::kAllReduce);
    killedInCollective(path, CollectiveKind::kBarrier);
  }
}

TEST(stopped_peer_times_out_for_those_who_wait_for_it) {
  for (const Path path : {Path::kShm, Path::kTcp}) {
    runJob(
        2,
        [path](Member& member) {
          Settings settings = settingsFor(path, 2);
          settings.peer_timeout_ms = 2000;
          auto runtime = joinRuntime(member, settings);
          auto group = world(*runtime, 2);
          checkedAllReduce(*group, 100, 1);
          const auto pids = member.exchange(std::to_string(::getpid()));
          if (member.rank() == 1) {
            ::kill(::getpid(), SIGSTOP);
            fail(__FILE__, __LINE__, "the stopped rank went on");
          }
          std::vector<float> values(10);
          CHECK_EQ(outcome(group->receive(bufferOf(values), 1, 1, kCallLimit)), std::string("timeout"));
          ::kill(std::stoi(pids[1]), SIGKILL);
          runtime->shutdown();
        },
        1);
  }
}

TEST(operation_that_outlasts_its_own_time_out_ends_with_it_and_aborts_the_others) {
  for (const Path path : kPaths) {
    runJob(2, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 2));
      auto group = world(*runtime, 2);
      checkedAllReduce(*group, 100, 1);
      std::vector<float> values(10);
      if (member.rank() == 0) {
        // A wait that runs out changes nothing.
        auto patient = group->receive(bufferOf(values), 1, 1, kCallLimit);
        CHECK_THROWS(patient->wait(Milliseconds(50)), CollectiveTimeout);
        CHECK(!patient->finished());
        auto hasty = group->receive(bufferOf(values), 1, 2, Milliseconds(200));
        CHECK_EQ(outcome(hasty), std::string("timeout"));
        CHECK_EQ(outcome(patient), std::string("aborted -1"));
      } else {
        eventually([&] { return runtime->aborted(); }, "the other rank's time-out is heard");
      }
      runtime->shutdown();
    });
  }
}

TEST(message_larger_than_its_buffer_is_a_mismatch) {
  for (const Path path : kPaths) {
    for (const std::size_t count : {20, 100'000}) {
      for (const bool early : {false, true}) {
        runJob(2, [path, count, early](Member& member) {
          auto runtime = joinRuntime(member, settingsFor(path, 2));
          auto group = world(*runtime, 2);
          barrier(*group);
          std::vector<int> values(member.rank() == 0 ? count - 1 : count);
          if (member.rank() == 0) {
            std::shared_ptr<Operation> operation;
            if (early) operation = group->receive(bufferOf(values), 1, 1, kCallLimit);
            member.meet();
            member.meet();
            if (!early) operation = group->receive(bufferOf(values), 1, 1, kCallLimit);
            CHECK_THROWS(operation->wait(), CollectiveMismatch);
          } else {
            member.meet();
            auto operation = group->send(bufferOf(values), 0, 1, kCallLimit);
            member.meet();
            outcome(operation);
          }
          member.meet();
          runtime->shutdown();
        });
      }
    }
  }
}

TEST(different_calls_are_a_mismatch_on_some_rank_and_end_on_all) {
  for (const Path path : kPaths) {
    const auto ended = runJob(2, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 2));
      auto group = world(*runtime, 2);
      checkedAllReduce(*group, 100, 1);
      std::vector<float> values(member.rank() == 0 ? 1000 : 2000);
      try {
        start(*group, CollectiveKind::kAllReduce, {}, {bufferOf(values)})->wait();
        fail(__FILE__, __LINE__, "vectors of different sizes were reduced");
      } catch (const CollectiveMismatch&) {
        member.report("mismatch");
      } catch (const CollectiveAborted&) {
      }
      runtime->shutdown();
    });
    CHECK(ended[0].reports.size() + ended[1].reports.size() > 0);
  }
}

// --- what an outstanding operation costs ----------------------------------------------------------------------------

TEST(outstanding_receive_that_nobody_waits_for_takes_no_processor_time) {
  for (const Path path : kPaths) {
    const auto ended = runJob(2, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 2));
      auto group = world(*runtime, 2);
      std::vector<float> values(10);
      std::vector<float> first(10);
      auto one = member.rank() == 0 ? group->receive(bufferOf(first), 1, 1, kCallLimit)
                                    : group->send(bufferOf(first), 0, 1, kCallLimit);
      one->wait();
      std::shared_ptr<Operation> two;
      if (member.rank() == 0) two = group->receive(bufferOf(values), 1, 2, kCallLimit);
      member.meet();
      if (member.rank() == 0) {
        const double before = processorSeconds();
        const std::uint64_t start_ms = monotonicMs();
        eventually([&] { return monotonicMs() - start_ms > 500; }, "half a second passes");
        member.report(std::to_string((processorSeconds() - before) / 0.5));
      }
      member.meet();
      if (member.rank() == 1) group->send(bufferOf(values), 0, 2, kCallLimit)->wait();
      if (member.rank() == 0) two->wait();
      member.meet();
      runtime->shutdown();
    });
    const double share = std::stod(ended[0].reports.at(0));
    std::printf("     %s: %.0f %% of a core\n", nameOf(path), share * 100);
    CHECK(share < 0.1);
  }
}

}  // namespace
}  // namespace trainmover
