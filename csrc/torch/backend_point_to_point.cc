// send, recv, recvAnysource and monitoredBarrier, which is made of them. See backend.h.
#include "base/errors.h"
#include "torch/backend.h"

namespace trainmover {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Tags of users are not negative.
constexpr std::int64_t kMonitoredBarrierTag = -2;

const at::Tensor& onlyTensor(const char* operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, ": found ", tensors.size(), " tensors; expected one");
  return tensors.front();
}

milliseconds leftUntil(Clock::time_point deadline) {
  return std::max(milliseconds{1}, std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

/// Waits for a byte of each other group rank. Returns those whose byte did not come; all, or only the first.
std::vector<int> absentRanks(Communicator& communicator, Clock::time_point deadline, bool all) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(communicator.size()));
  std::vector<std::shared_ptr<Operation>> arrivals;
  for (int rank = 1; rank < communicator.size(); ++rank) {
    const Buffer byte{&bytes[static_cast<std::size_t>(rank)], 1};
    arrivals.push_back(communicator.receive(byte, rank, kMonitoredBarrierTag, leftUntil(deadline)));
  }
  // Each receive is seen to its end, for it writes to `bytes`.
  std::vector<int> absent;
  for (std::size_t index = 0; index < arrivals.size(); ++index) {
    try {
      arrivals[index]->wait();
    } catch (const CollectiveAborted&) {
      throw;
    } catch (const CollectiveError&) {
      if (all || absent.empty()) {
        absent.push_back(static_cast<int>(index) + 1);
      }
    }
  }
  return absent;
}

}  // namespace

Backend::WorkPointer Backend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = onlyTensor("send", tensors);
  Executor& executor = executorFor(tensor.device());
  Operands operands;
  const Buffer buffer = operands.input(tensor);
  executor.recordReady();
  return finishStart(executor, c10d::OpType::SEND, executor.enqueueSend(communicator(), buffer, to, tag),
                     std::move(operands));
}

Backend::WorkPointer Backend::recv(Tensors& tensors, int from, int tag) {
  return receiveFrom(tensors, from, tag, c10d::OpType::RECV);
}

Backend::WorkPointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return receiveFrom(tensors, kAnySource, tag, c10d::OpType::RECVANYSOURCE);
}

Backend::WorkOfOne Backend::receiveFrom(Tensors& tensors, int from, int tag, c10d::OpType type) {
  const at::Tensor& tensor = onlyTensor("recv", tensors);
  Executor& executor = executorFor(tensor.device());
  Operands operands;
  const Buffer buffer = operands.output(tensor);
  executor.recordReady();
  return finishStart(executor, type, executor.enqueueReceive(communicator(), buffer, from, tag), std::move(operands));
}

// A debugging aid: rank 0 hears from each rank by itself, so that it can name those that do not come.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const milliseconds timeout = options.timeout > milliseconds{0} ? options.timeout : options_->timeout;
  const Clock::time_point deadline = Clock::now() + timeout;
  std::uint8_t byte = 0;
  const Buffer buffer{&byte, 1};
  if (getRank() != 0) {
    communicator().send(buffer, 0, kMonitoredBarrierTag, timeout)->wait();
    communicator().receive(buffer, 0, kMonitoredBarrierTag, leftUntil(deadline))->wait();
    return;
  }
  const std::vector<int> absent = absentRanks(communicator(), deadline, wait_all_ranks);
  if (!absent.empty()) {
    throw CollectiveTimeout("monitored_barrier of group " + communicator().name() + ": group rank " + listed(absent) +
                            " did not come within " + std::to_string(timeout.count()) +
                            " ms; look there for what it does instead");
  }
  std::vector<std::shared_ptr<Operation>> releases;
  for (int rank = 1; rank < getSize(); ++rank) {
    releases.push_back(communicator().send(buffer, rank, kMonitoredBarrierTag, leftUntil(deadline)));
  }
  for (const auto& release : releases) {
    release->wait();
  }
}

}  // namespace trainmover
