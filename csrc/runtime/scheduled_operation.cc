#include "runtime/scheduled_operation.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "reduce/kernels.h"

namespace trainmover {
namespace {

constexpr std::size_t kComputeBytesMax = std::size_t{4} << 20;  // at one go, so that the lock is not held for long
constexpr int kTagBits = 24;
constexpr int kPhaseBits = 1;

}  // namespace

ScheduledOperation::ScheduledOperation(Engine& engine, Messenger& messenger, Schedule schedule,
                                       const CollectiveCall& call, int size, std::uint64_t sequence)
    : PendingOperation(engine),
      messenger_(messenger),
      schedule_(std::move(schedule)),
      dtype_(call.dtype),
      op_(call.op),
      size_(size),
      sequence_(sequence),
      inputs_(call.inputs),
      outputs_(call.outputs) {
  if (inputs_.empty() && !outputs_.empty()) inputs_ = outputs_;
}

// Work that needs no messages but memory: done when the operation's turn has come, not when it is queued.
void ScheduledOperation::prepare() {
  prepared_ = true;
  const auto& steps = schedule_.steps;
  if (schedule_.scratch_bytes > 0) {
    scratch_memory_.reset(new unsigned char[schedule_.scratch_bytes + 64]);
    const auto address = reinterpret_cast<std::uintptr_t>(scratch_memory_.get());
    scratch_ = scratch_memory_.get() + (64 - address % 64) % 64;
  }
  transfers_.assign(steps.size(), Transfer{});
  missing_.assign(steps.size(), 0);
  in_flight_.assign(steps.size(), false);
  successor_at_.assign(steps.size() + 1, 0);
  for (const Step& step : steps) {
    for (const auto before : step.after) ++successor_at_[static_cast<std::size_t>(before) + 1];
  }
  for (std::size_t i = 1; i < successor_at_.size(); ++i) successor_at_[i] += successor_at_[i - 1];
  successors_.assign(successor_at_.back(), 0);
  std::vector<std::uint32_t> fill(successor_at_.begin(), successor_at_.end() - 1);
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    for (const auto before : steps[i].after) {
      successors_[fill[static_cast<std::size_t>(before)]++] = i;
      ++missing_[i];
    }
  }
  remaining_ = steps.size();
  for (std::uint32_t i = static_cast<std::uint32_t>(steps.size()); i-- > 0;) {
    if (missing_[i] == 0) ready_.push_back(i);
  }
}

bool ScheduledOperation::advance() {
  if (!prepared_) prepare();
  std::size_t computed = 0;
  while (!ready_.empty() && computed < kComputeBytesMax) {
    const std::uint32_t index = ready_.back();
    ready_.pop_back();
    computed += schedule_.steps[index].target.bytes;
    start(index);
  }
  if (remaining_ > 0) return false;
  if (!next_schedule) return true;
  Schedule next;
  const bool more = next_schedule(next, scratch_);
  next_schedule = nullptr;
  if (!more) return true;
  schedule_ = std::move(next);
  prepared_ = false;
  ++phase_;
  return advance();
}

bool ScheduledOperation::waitsFor(int group_rank) const {
  for (std::size_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i] && transfers_[i].peer == group_rank) return true;
  }
  return false;
}

void ScheduledOperation::start(std::uint32_t index) {
  const Step& step = schedule_.steps[index];
  if (step.kind != StepKind::kSend && step.kind != StepKind::kReceive) {
    compute(step);
    complete(index);
    return;
  }
  const bool is_send = step.kind == StepKind::kSend;
  const Region& region = is_send ? step.source : step.target;
  Transfer& transfer = transfers_[index];
  transfer.message_class = FrameClass::kCollective;
  transfer.is_send = is_send;
  transfer.peer = step.peer;
  transfer.key = ((sequence_ << kPhaseBits | phase_) << kTagBits) | step.tag;
  transfer.data = region.bytes > 0 ? at(region) : nullptr;
  transfer.bytes = region.bytes;
  transfer.listener = this;
  transfer.index = index;
  in_flight_[index] = true;
  messenger_.submit(transfer);
}

void ScheduledOperation::compute(const Step& step) {
  unsigned char* target = at(step.target);
  const unsigned char* source = at(step.source);
  switch (step.kind) {
    case StepKind::kCopy:
      if (target != source) std::memmove(target, source, step.source.bytes);
      return;
    case StepKind::kReduce:
      return accumulate(target, source, step.source_form, step.target_first, step.count, dtype_, op_);
    case StepKind::kWiden:
      return widen(target, source, step.count, dtype_);
    case StepKind::kFinish:
      return finish(target, source, step.count, dtype_, op_, size_);
    default:
      throw std::logic_error("a step that is neither message nor computation");
  }
}

void ScheduledOperation::complete(std::uint32_t index) {
  --remaining_;
  for (std::uint32_t i = successor_at_[index]; i < successor_at_[index + 1]; ++i) {
    if (--missing_[successors_[i]] == 0) ready_.push_back(successors_[i]);
  }
}

void ScheduledOperation::transferEnded(Transfer& transfer) {
  in_flight_[transfer.index] = false;
  complete(transfer.index);
}

unsigned char* ScheduledOperation::at(const Region& region) {
  switch (region.space) {
    case Space::kScratch:
      return scratch_ + region.offset;
    case Space::kInput:
      return static_cast<unsigned char*>(inputs_[static_cast<std::size_t>(region.piece)].data) + region.offset;
    case Space::kOutput:
      break;
  }
  return static_cast<unsigned char*>(outputs_[static_cast<std::size_t>(region.piece)].data) + region.offset;
}

}  // namespace trainmover
