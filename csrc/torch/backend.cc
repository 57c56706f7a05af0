// Life of a Backend, time-outs, coalescing, and the one place where operations start. See backend.h.
#include "torch/backend.h"

#include "base/errors.h"
#include "torch/without_gil.h"

namespace trainmover {
namespace {

c10::intrusive_ptr<c10d::Backend::Options> makeOptions(const std::string& name, const std::vector<int>& global_ranks,
                                                       std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("trainmover", timeout);
  options->group_name = name;
  options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
  return options;
}

}  // namespace

Backend::Backend(std::shared_ptr<OpenGroup> group, const std::vector<int>& global_ranks,
                 std::chrono::milliseconds timeout)
    : c10d::Backend(group->communicator().rank(), group->communicator().size()),
      group_(std::move(group)),
      options_(makeOptions(group_->communicator().name(), global_ranks, timeout)) {}

Backend::~Backend() {
  try {
    const WithoutGil without_gil;
    group_->close();
  } catch (const std::exception& error) {
    TORCH_WARN("backend trainmover: group ", group_->communicator().name(), " did not close: ", error.what());
  }
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator().setTimeout(timeout);
}

uint64_t Backend::getSequenceNumberForGroup() { return communicator().sequence(); }

c10d::ErrorType Backend::getError() {
  return group_->dataPlane().runtime().aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  const WithoutGil without_gil;
  group_->close();
}

void Backend::shutdown() {
  const WithoutGil without_gil;
  group_->close();
}

// Operations start when they are called, never later, so a group of them needs no more than one handle for all.
void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalesced_.clear();
  coalescing_.store(true, std::memory_order_release);
}

Backend::WorkPointer Backend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalescing_.store(false, std::memory_order_release);
  return c10::make_intrusive<BatchWork>(getRank(), c10d::OpType::COALESCED, std::exchange(coalesced_, {}));
}

Backend::WorkOfOne Backend::start(c10::Device device, c10d::OpType type, const CollectiveCall& call,
                                  Operands&& operands) {
  Executor& executor = executorFor(device);
  executor.recordReady();
  return finishStart(executor, type, executor.enqueue(communicator(), call), std::move(operands));
}

Backend::WorkOfOne Backend::finishStart(Executor& executor, c10d::OpType type, std::shared_ptr<Operation> operation,
                                        Operands&& operands) {
  auto work = c10::make_intrusive<OperationWork>(group_, executor, type, std::move(operation), std::move(operands));
  if (coalescing_.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

Backend::WorkPointer Backend::batch(c10d::OpType type, std::vector<WorkOfOne> works) {
  return c10::make_intrusive<BatchWork>(getRank(), type, std::move(works));
}

}  // namespace trainmover
