// Barrier by dissemination: after rounds at distance 1, 2, 4 ... each rank has heard, at some remove, of all. Called by
// schedule.cc.
#include "collectives/builders.h"
#include "collectives/schedule_builder.h"

namespace trainmover {

Schedule buildBarrier(const Shape& shape) {
  ScheduleBuilder builder(shape, 2 * 32);
  StepId sent = kNoStep;
  StepId heard = kNoStep;
  std::uint64_t tag = 0;
  for (long distance = 1; distance < shape.size; distance *= 2, ++tag) {
    // The send before has waited for all that was heard before that.
    sent = builder.signal(StepKind::kSend, modulo(shape.rank + distance, shape.size), tag, {sent, heard});
    heard = builder.signal(StepKind::kReceive, modulo(shape.rank - distance, shape.size), tag, {});
  }
  return builder.take();
}

}  // namespace trainmover
