// The runtime in real processes: operations of several communicators and threads do not disturb each other, whether
// somebody waits for them or nobody does.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "collectives/schedule.h"
#include "runtime_calls.h"

namespace trainmover {
namespace {

using namespace check;

// Rounds of asynchronous calls on one communicator, whose waits come in another order than the calls.
void useAsynchronously(Communicator& group, std::uint32_t seed, std::atomic<int>& callbacks) {
  std::mt19937 alike(seed);                                                // the same choices on all ranks
  std::mt19937 own(seed * 64 + static_cast<std::uint32_t>(group.rank()));  // this rank's own
  const int size = group.size();
  for (int round = 0; round < 6; ++round) {
    constexpr std::size_t kCalls = 6;
    std::vector<std::vector<std::int32_t>> values(kCalls), passed(kCalls), taken(kCalls);
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::size_t i = 0; i < kCalls; ++i) {
      const std::size_t count = alike() % 4 == 0 ? 30'000 + alike() % 50'000 : alike() % 3000;
      values[i].assign(count, group.rank() + static_cast<int>(i));
      operations.push_back(start(group, CollectiveKind::kAllReduce, {}, {bufferOf(values[i])}, 0, DataType::kInt32));
      passed[i].assign(count, group.rank() * 100 + static_cast<int>(i));
      taken[i].assign(count, -1);
      const auto tag = static_cast<std::int64_t>(kCalls - i);
      operations.push_back(group.send(bufferOf(passed[i]), (group.rank() + 1) % size, tag, kCallLimit));
      operations.push_back(group.receive(bufferOf(taken[i]), (group.rank() + size - 1) % size, tag, kCallLimit));
    }
    for (auto& operation : operations) operation->whenFinished([&callbacks] { callbacks.fetch_add(1); });
    std::shuffle(operations.begin(), operations.end(), own);
    for (auto& operation : operations) operation->wait();
    for (std::size_t i = 0; i < kCalls; ++i) {
      const int sum = size * (size - 1) / 2 + size * static_cast<int>(i);
      for (const int value : values[i]) CHECK_EQ(value, sum);
      for (const int value : taken[i]) CHECK_EQ(value, (group.rank() + size - 1) % size * 100 + static_cast<int>(i));
    }
  }
}

const std::vector<std::vector<int>> kGroups = {{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 1}, {2, 3}, {0, 2}, {1, 2, 3}};

void overlapping(Path path) {
  runJob(4, [path](Member& member) {
    auto runtime = joinRuntime(member, settingsFor(path, 4));
    std::vector<std::shared_ptr<Communicator>> groups;
    for (std::size_t i = 0; i < kGroups.size(); ++i) {
      const auto& ranks = kGroups[i];
      if (std::find(ranks.begin(), ranks.end(), member.rank()) == ranks.end()) continue;
      groups.push_back(runtime->createCommunicator("group " + std::to_string(i), ranks, kCallLimit));
    }
    std::atomic<int> callbacks{0};
    std::vector<std::string> why(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          useAsynchronously(*groups[i], 7, callbacks);
        } catch (const Failure& failure) {
          why[i] = failure.what;
        } catch (const std::exception& error) {
          why[i] = error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const std::string& reason : why) {
      if (!reason.empty()) fail(__FILE__, __LINE__, reason);
    }
    const int started = static_cast<int>(groups.size()) * 6 * 18;
    eventually([&] { return callbacks.load() == started; }, "every operation's callback runs, once");
    member.meet();
    runtime->shutdown();
  });
}
TEST(overlapping_communicators_work_from_several_threads_at_once_over_shm) { overlapping(Path::kShm); }
TEST(overlapping_communicators_work_from_several_threads_at_once_over_shm_without_cross_memory) {
  overlapping(Path::kShmWithoutCrossMemory);
}
TEST(overlapping_communicators_work_from_several_threads_at_once_over_tcp) { overlapping(Path::kTcp); }

// Operations that nobody waits for are driven to their end all the same.
TEST(operations_end_without_a_waiting_thread) {
  for (const Path path : kPaths) {
    runJob(3, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 3));
      auto group = world(*runtime, 3);
      for (int round = 0; round < 5; ++round) {
        std::vector<std::int32_t> values(round % 2 == 0 ? 100 : 300'000, member.rank());
        auto operation = start(*group, CollectiveKind::kAllReduce, {}, {bufferOf(values)}, 0, DataType::kInt32);
        eventually([&] { return operation->finished(); }, "the operation ends by itself");
        for (const int value : values) CHECK_EQ(value, 3);
      }
      member.meet();
      runtime->shutdown();
    });
  }
}

TEST(receives_from_any_source_take_each_message_once) {
  for (const Path path : kPaths) {
    runJob(4, [path](Member& member) {
      auto runtime = joinRuntime(member, settingsFor(path, 4));
      auto group = world(*runtime, 4);
      constexpr int kMessages = 20;
      const auto countOf = [](int i) { return static_cast<std::size_t>(i % 5 == 4 ? 30'000 : 10 + i); };
      if (member.rank() != 0) {
        for (int i = 0; i < kMessages; ++i) {
          std::vector<int> value(countOf(i), member.rank() * 1000 + i);
          group->send(bufferOf(value), 0, 5, kCallLimit)->wait();
        }
      } else {
        std::vector<int> next(4, 0);
        for (int i = 0; i < 3 * kMessages; ++i) {
          std::vector<int> value(30'000, -1);
          auto operation = group->receive(bufferOf(value), kAnySource, 5, kCallLimit);
          operation->wait();
          const auto source = static_cast<std::size_t>(operation->sourceRank());
          // In order of each sender.
          CHECK_EQ(operation->receivedBytes(), countOf(next[source]) * sizeof(int));
          CHECK_EQ(value[0], static_cast<int>(source) * 1000 + next[source]++);
        }
        CHECK_EQ(next, (std::vector<int>{0, kMessages, kMessages, kMessages}));
      }
      member.meet();
      runtime->shutdown();
    });
  }
}

}  // namespace
}  // namespace trainmover
