// How the builders write their steps down. Internal to collectives/. A step that would move or reduce nothing is left
// out: its id is kNoStep, and waiting for kNoStep is waiting for nothing, which is right, as nothing lies there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "collectives/reduction_order.h"
#include "collectives/schedule.h"

namespace trainmover {

using StepId = std::uint32_t;
constexpr StepId kNoStep = ~StepId{0};
using Waits = std::initializer_list<StepId>;  // kNoStep allowed

class ScheduleBuilder {
 public:
  ScheduleBuilder(const Shape& shape, std::size_t expected_steps);

  /// For when it is known late how many steps there will be.
  void expect(std::size_t steps) { schedule_.steps.reserve(steps); }

  /// Sets scratch apart, aligned as Region asks.
  Region scratch(std::size_t bytes);

  StepId send(int peer, std::uint64_t tag, const Region& source, Waits waits);
  StepId send(int peer, std::uint64_t tag, const Region& source, const std::vector<StepId>& waits);
  StepId receive(int peer, std::uint64_t tag, const Region& target, Waits waits);
  StepId copy(const Region& source, const Region& target, Waits waits);
  StepId widen(const Region& elements, const Region& accumulators, std::size_t count, Waits waits);
  StepId reduce(const Region& source, Form form, const Region& target, std::size_t count, bool target_first,
                Waits waits);

  /// Turns accumulators into what the caller gets, at `elements`. Emits no step, and returns `ready`, when they are
  /// that already and lie there already.
  StepId finish(const Region& accumulators, const Region& elements, std::size_t count, StepId ready,
                StepId also = kNoStep);

  /// One step that follows all of `steps`.
  StepId join(const std::vector<StepId>& steps);

  /// A message of 0 bytes, which nothing else than a barrier sends.
  StepId signal(StepKind kind, int peer, std::uint64_t tag, Waits waits);

  Schedule take() { return std::move(schedule_); }

  /// Whether elements and accumulators differ (16-bit floats).
  bool wide() const { return element_bytes_ != accumulator_bytes_; }
  std::size_t elementBytes() const { return element_bytes_; }
  std::size_t accumulatorBytes() const { return accumulator_bytes_; }

  /// The elements, or accumulators, of `slice` in a region that begins with element, or accumulator, 0.
  Region elements(const Region& base, Slice slice) const { return cut(base, slice, element_bytes_); }
  Region accumulators(const Region& base, Slice slice) const { return cut(base, slice, accumulator_bytes_); }
  Region inForm(const Region& base, Slice slice, Form form) const {
    return cut(base, slice, form == Form::kElement ? element_bytes_ : accumulator_bytes_);
  }

 private:
  static Region cut(const Region& base, Slice slice, std::size_t unit) {
    return Region{base.space, base.piece, base.offset + slice.begin * unit, (slice.end - slice.begin) * unit};
  }
  StepId push(StepKind kind, Waits waits);
  StepId message(StepKind kind, int peer, std::uint64_t tag, Waits waits);

  std::size_t element_bytes_;
  std::size_t accumulator_bytes_;
  bool finishes_;  // accumulators need a kFinish to become elements
  Schedule schedule_;
};

/// `bytes` from `offset` of `base`.
inline Region partOf(const Region& base, std::size_t offset, std::size_t bytes) {
  return Region{base.space, base.piece, base.offset + offset, bytes};
}

inline Region inputPiece(int piece, std::size_t bytes) { return Region{Space::kInput, piece, 0, bytes}; }
inline Region outputPiece(int piece, std::size_t bytes) { return Region{Space::kOutput, piece, 0, bytes}; }

inline std::size_t roundUp(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }
inline std::size_t partsOf(std::size_t whole, std::size_t part) { return whole / part + (whole % part != 0); }

/// Part `index` of `count` elements (or bytes) that are cut into parts of `part`; empty past the end.
inline Slice chunkOf(std::size_t count, std::size_t part, std::size_t index) {
  const std::size_t begin = index * part < count ? index * part : count;
  return Slice{begin, count - begin < part ? count : begin + part};
}

/// In which parts `bytes` go through a pipeline: about eight, none so small that what a message costs would show, and
/// larger ones only when there would be very many. A multiple of 64.
std::size_t pipelineChunkBytes(std::size_t bytes);
constexpr std::size_t kUsualChunkBytes = std::size_t{256} << 10;

inline int modulo(long value, int size) { return static_cast<int>((value % size + size) % size); }

}  // namespace trainmover
