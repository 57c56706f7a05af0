// See work.h.
#include "torch/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "base/errors.h"

namespace trainmover {
namespace {

using c10::ivalue::Future;

c10d::WorkResult resultOf(const std::exception_ptr& error) {
  if (!error) {
    return c10d::WorkResult::SUCCESS;
  }
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveTimeout&) {
    return c10d::WorkResult::TIMEOUT;
  } catch (const CollectiveError&) {
    return c10d::WorkResult::COMM_ERROR;
  } catch (...) {
    return c10d::WorkResult::UNKNOWN;
  }
}

/// Futures run their callbacks where they are completed. Those that are Python take the GIL themselves.
void completeValue(c10d::Work& work, Future& future) {
  if (std::exception_ptr error = work.exception()) {
    future.setError(error);
    return;
  }
  c10::List<at::Tensor> values;
  for (at::Tensor& tensor : work.result()) {
    values.push_back(std::move(tensor));
  }
  future.markCompleted(c10::IValue(std::move(values)));
}

void completeResult(c10d::Work& work, Future& future) {
  future.markCompleted(c10::IValue(static_cast<int64_t>(resultOf(work.exception()))));
}

c10::intrusive_ptr<Future> newValueFuture() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

c10::intrusive_ptr<Future> newResultFuture() { return c10::make_intrusive<Future>(c10::IntType::get()); }

/// The future in `slot`. When it is new, `whenFinished` is asked, without the lock, to run `complete` on it at the end.
template <typename Make, typename WhenFinished, typename Complete>
c10::intrusive_ptr<Future> futureIn(c10::intrusive_ptr<Future>& slot, std::mutex& mutex, Make make,
                                    WhenFinished whenFinished, Complete complete) {
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (slot) {
      return slot;
    }
    future = slot = make();
  }
  whenFinished([complete, future] { complete(*future); });
  return future;
}

template <typename T>
c10::intrusive_ptr<T> sharedFrom(T* object) {
  return c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object);
}

}  // namespace

OperationWork::OperationWork(std::shared_ptr<OpenGroup> group, Executor& executor, c10d::OpType type,
                             std::shared_ptr<Operation> operation, Operands&& operands)
    : c10d::Work(group->communicator().rank(), type),
      group_(std::move(group)),
      executor_(executor),
      operation_(std::move(operation)),
      operands_(std::move(operands)),
      sequence_(group_->communicator().sequence()),
      settled_(!operands_.copiesBack()) {}

OperationWork::~OperationWork() {
  if (!operation_->finished()) {
    operation_->whenFinished([kept = std::make_shared<Operands>(std::move(operands_))] {});
  }
}

void OperationWork::settle() {
  if (settled_.load(std::memory_order_acquire)) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!settled_.load(std::memory_order_relaxed)) {
    if (!operation_->error()) {
      operands_.copyBack();
    }
    settled_.store(true, std::memory_order_release);
  }
}

bool OperationWork::isCompleted() {
  if (!operation_->finished()) {
    return false;
  }
  settle();
  return true;
}

bool OperationWork::isSuccess() const { return operation_->finished() && !operation_->error(); }

std::exception_ptr OperationWork::exception() const { return operation_->error(); }

int OperationWork::sourceRank() const { return operation_->sourceRank(); }

std::vector<at::Tensor> OperationWork::result() { return operands_.results(); }

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  executor_.makeCurrentStreamWait(*operation_, timeout);
  settle();
  return true;
}

void OperationWork::synchronize() { wait(kNoTimeout); }

void OperationWork::blockCurrentStream() { wait(kNoTimeout); }

void OperationWork::abort() { group_->dataPlane().runtime().abortCollectives(-1, "Work.abort() was called"); }

c10::intrusive_ptr<Future> OperationWork::getFuture() {
  return futureIn(
      futures_.value, mutex_, newValueFuture,
      [this](std::function<void()> callback) { operation_->whenFinished(std::move(callback)); },
      [self = sharedFrom(this)](Future& future) {
        self->settle();
        completeValue(*self, future);
      });
}

c10::intrusive_ptr<Future> OperationWork::getFutureResult() {
  return futureIn(
      futures_.result, mutex_, newResultFuture,
      [this](std::function<void()> callback) { operation_->whenFinished(std::move(callback)); },
      [self = sharedFrom(this)](Future& future) { completeResult(*self, future); });
}

BatchWork::BatchWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<OperationWork>> works)
    : c10d::Work(rank, type), works_(std::move(works)) {}

bool BatchWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) {
      return false;
    }
  }
  return true;
}

bool BatchWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) {
      return false;
    }
  }
  return true;
}

std::exception_ptr BatchWork::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr error = work->exception()) {
      return error;
    }
  }
  return nullptr;
}

std::vector<at::Tensor> BatchWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) {
      all.push_back(std::move(tensor));
    }
  }
  return all;
}

bool BatchWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  return true;
}

void BatchWork::synchronize() { wait(kNoTimeout); }

void BatchWork::blockCurrentStream() { wait(kNoTimeout); }

void BatchWork::abort() {
  if (!works_.empty()) {
    works_.front()->abort();
  }
}

uint64_t BatchWork::getSequencenumber() const { return works_.empty() ? 0 : works_.back()->getSequencenumber(); }

void BatchWork::whenAllFinished(std::function<void()> callback) {
  if (works_.empty()) {
    callback();
    return;
  }
  auto left = std::make_shared<std::atomic<std::size_t>>(works_.size());
  for (const auto& work : works_) {
    work->operation().whenFinished([left, callback] {
      if (left->fetch_sub(1, std::memory_order_acq_rel) == 1) {
        callback();
      }
    });
  }
}

c10::intrusive_ptr<Future> BatchWork::getFuture() {
  return futureIn(
      futures_.value, mutex_, newValueFuture,
      [this](std::function<void()> callback) { whenAllFinished(std::move(callback)); },
      [self = sharedFrom(this)](Future& future) {
        for (const auto& work : self->works_) {
          work->settle();
        }
        completeValue(*self, future);
      });
}

c10::intrusive_ptr<Future> BatchWork::getFutureResult() {
  return futureIn(
      futures_.result, mutex_, newResultFuture,
      [this](std::function<void()> callback) { whenAllFinished(std::move(callback)); },
      [self = sharedFrom(this)](Future& future) { completeResult(*self, future); });
}

}  // namespace trainmover
