// See schedule_builder.h.
#include "collectives/schedule_builder.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trainmover {

namespace {
constexpr std::size_t kScratchAlignment = 64;
constexpr std::size_t kSmallChunkBytes = std::size_t{64} << 10;
constexpr std::size_t kManyBytes = std::size_t{256} << 20;  // from here on in chunks of kChunkBytes
constexpr std::size_t kPipelineDepth = 8;
}  // namespace

std::size_t pipelineChunkBytes(std::size_t bytes) {
  if (bytes >= kManyBytes) return kChunkBytes;
  return std::clamp(roundUp(bytes / kPipelineDepth, kScratchAlignment), kSmallChunkBytes, kUsualChunkBytes);
}

ScheduleBuilder::ScheduleBuilder(const Shape& shape, std::size_t expected_steps)
    : element_bytes_(trainmover::elementBytes(shape.dtype)),
      accumulator_bytes_(trainmover::accumulatorBytes(shape.dtype)),
      finishes_(element_bytes_ != accumulator_bytes_ || shape.op == ReduceOp::kAverage) {
  schedule_.steps.reserve(expected_steps);
}

Region ScheduleBuilder::scratch(std::size_t bytes) {
  const std::size_t offset = schedule_.scratch_bytes;
  schedule_.scratch_bytes += roundUp(bytes, kScratchAlignment);
  return Region{Space::kScratch, 0, offset, bytes};
}

StepId ScheduleBuilder::push(StepKind kind, Waits waits) {
  Step& step = schedule_.steps.emplace_back();
  step.kind = kind;
  for (StepId wait : waits) {
    if (wait != kNoStep) step.after.add(wait);
  }
  return static_cast<StepId>(schedule_.steps.size() - 1);
}

StepId ScheduleBuilder::message(StepKind kind, int peer, std::uint64_t tag, Waits waits) {
  if (tag >= kTagsMax) {
    throw std::invalid_argument("a collective would take more messages than can be numbered (" + std::to_string(tag) +
                                ", expected fewer than " + std::to_string(kTagsMax) +
                                "); call it on smaller parts of the vector");
  }
  const StepId id = push(kind, waits);
  Step& step = schedule_.steps[id];
  step.peer = peer;
  step.tag = static_cast<std::uint32_t>(tag);
  return id;
}

StepId ScheduleBuilder::send(int peer, std::uint64_t tag, const Region& source, Waits waits) {
  if (source.bytes == 0) return kNoStep;
  const StepId id = message(StepKind::kSend, peer, tag, waits);
  schedule_.steps[id].source = source;
  return id;
}

StepId ScheduleBuilder::send(int peer, std::uint64_t tag, const Region& source, const std::vector<StepId>& waits) {
  if (source.bytes == 0) return kNoStep;
  if (waits.size() > After::kMax) return send(peer, tag, source, {join(waits)});
  const StepId id = send(peer, tag, source, Waits{});
  for (StepId wait : waits) {
    if (wait != kNoStep) schedule_.steps[id].after.add(wait);
  }
  return id;
}

StepId ScheduleBuilder::receive(int peer, std::uint64_t tag, const Region& target, Waits waits) {
  if (target.bytes == 0) return kNoStep;
  const StepId id = message(StepKind::kReceive, peer, tag, waits);
  schedule_.steps[id].target = target;
  return id;
}

StepId ScheduleBuilder::signal(StepKind kind, int peer, std::uint64_t tag, Waits waits) {
  return message(kind, peer, tag, waits);
}

StepId ScheduleBuilder::copy(const Region& source, const Region& target, Waits waits) {
  if (source.bytes == 0) return kNoStep;
  const StepId id = push(StepKind::kCopy, waits);
  schedule_.steps[id].source = source;
  schedule_.steps[id].target = target;
  return id;
}

StepId ScheduleBuilder::widen(const Region& elements, const Region& accumulators, std::size_t count, Waits waits) {
  if (!wide()) return copy(elements, accumulators, waits);
  if (count == 0) return kNoStep;
  const StepId id = push(StepKind::kWiden, waits);
  Step& step = schedule_.steps[id];
  step.source = elements;
  step.target = accumulators;
  step.count = count;
  return id;
}

StepId ScheduleBuilder::reduce(const Region& source, Form form, const Region& target, std::size_t count,
                               bool target_first, Waits waits) {
  if (count == 0) return kNoStep;
  const StepId id = push(StepKind::kReduce, waits);
  Step& step = schedule_.steps[id];
  step.source_form = form;
  step.target_first = target_first;
  step.count = count;
  step.source = source;
  step.target = target;
  return id;
}

StepId ScheduleBuilder::finish(const Region& accumulators, const Region& elements, std::size_t count, StepId ready,
                               StepId also) {
  if (count == 0) return kNoStep;
  if (!finishes_) {
    const bool there = accumulators.space == elements.space && accumulators.piece == elements.piece &&
                       accumulators.offset == elements.offset;
    if (!there) return copy(accumulators, elements, {ready, also});
    return also == kNoStep ? ready : join({ready, also});
  }
  const StepId id = push(StepKind::kFinish, {ready, also});
  Step& step = schedule_.steps[id];
  step.source = accumulators;
  step.target = elements;
  step.count = count;
  return id;
}

StepId ScheduleBuilder::join(const std::vector<StepId>& steps) {
  StepId only = kNoStep;
  std::size_t real = 0;
  for (StepId step : steps) {
    if (step == kNoStep) continue;
    only = step;
    ++real;
  }
  if (real <= 1) return only;
  StepId id = push(StepKind::kCopy, {});
  for (StepId step : steps) {
    if (step == kNoStep) continue;
    if (schedule_.steps[id].after.full()) id = push(StepKind::kCopy, {id});
    schedule_.steps[id].after.add(step);
  }
  return id;
}

}  // namespace trainmover
