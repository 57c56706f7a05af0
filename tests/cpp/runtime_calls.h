// How the tests of the runtime make ranks and calls: the transports they run on, and each operation in a line. Used by
// the runtime_*_test.cc.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "job.h"
#include "runtime/runtime.h"

namespace trainmover::check {

using Milliseconds = std::chrono::milliseconds;
constexpr Milliseconds kCallLimit{30'000};

enum class Path { kShm, kShmWithoutCrossMemory, kTcp };
constexpr Path kPaths[] = {Path::kShm, Path::kShmWithoutCrossMemory, Path::kTcp};

inline const char* nameOf(Path path) {
  return path == Path::kShm ? "shm" : path == Path::kTcp ? "tcp" : "shm without cross memory";
}

inline Settings settingsFor(Path path, int ranks) {
  Settings settings;
  settings.use_shared_memory = path != Path::kTcp;
  settings.use_cross_memory = path == Path::kShm;
  settings.local_ranks = static_cast<std::uint32_t>(ranks);
  settings.flight_recorder_entries = 64;
  return settings;
}

inline std::shared_ptr<Communicator> world(Runtime& runtime, int size, const std::string& name = "world") {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return runtime.createCommunicator(name, ranks, kCallLimit);
}

template <typename T>
Buffer bufferOf(std::vector<T>& values) {
  return {values.data(), values.size() * sizeof(T)};
}

inline std::shared_ptr<Operation> start(Communicator& communicator, CollectiveKind kind, std::vector<Buffer> inputs,
                                        std::vector<Buffer> outputs, int root = 0, DataType dtype = DataType::kFloat32,
                                        ReduceOp op = ReduceOp::kSum, bool waited_at_once = false) {
  CollectiveCall call;
  call.kind = kind;
  call.dtype = dtype;
  call.op = op;
  call.root = root;
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  call.waited_at_once = waited_at_once;
  return communicator.start(call);
}

inline void barrier(Communicator& communicator) {
  start(communicator, CollectiveKind::kBarrier, {}, {}, 0, DataType::kUInt8, ReduceOp::kSum, true)->wait();
}

/// An all-reduce whose result is checked; `salt` tells calls apart.
inline void checkedAllReduce(Communicator& communicator, std::size_t count, int salt) {
  std::vector<std::int32_t> values(count);
  const int size = communicator.size();
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<std::int32_t>(i % 1000) * salt + communicator.rank();
  }
  start(communicator, CollectiveKind::kAllReduce, {}, {bufferOf(values)}, 0, DataType::kInt32)->wait();
  for (std::size_t i = 0; i < count; ++i) {
    CHECK_EQ(values[i], static_cast<std::int32_t>(i % 1000) * salt * size + size * (size - 1) / 2);
  }
}

/// What `operation` ended with: "ok", "lost 2", "aborted 2", "timeout", or the text of another error.
inline std::string outcome(const std::shared_ptr<Operation>& operation) {
  try {
    operation->wait(kCallLimit);
    return "ok";
  } catch (const PeerLost& error) {
    return "lost " + std::to_string(error.globalRank());
  } catch (const CollectiveAborted& error) {
    return "aborted " + std::to_string(error.culprit());
  } catch (const CollectiveTimeout& error) {
    return "timeout";
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Ends the test unless `condition` comes true within `limit_ms`; looks again and again, yielding.
template <typename Condition>
void eventually(Condition condition, const char* what, std::uint64_t limit_ms = 20'000) {
  const std::uint64_t deadline_ms = monotonicMs() + limit_ms;
  while (!condition()) {
    if (monotonicMs() > deadline_ms) fail(__FILE__, __LINE__, std::string("it never came true: ") + what);
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace trainmover::check
