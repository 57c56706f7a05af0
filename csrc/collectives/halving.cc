// See halving.h.
#include "collectives/halving.h"

namespace trainmover {

std::size_t halvingBufferBytes(const ReductionTree& tree, int rank, const std::vector<std::size_t>& bounds, int turn,
                               std::size_t accumulator_bytes) {
  const int distance = tree.firstDistance() >> turn;  // what is kept later is part of this
  if (distance == 0) return 0;
  const Slice kept = blocksAt(bounds, blocksKept(rank, distance), distance);
  return roundUp((kept.end - kept.begin) * accumulator_bytes, 64);
}

HalvingResult halve(ScheduleBuilder& builder, const ReductionTree& tree, int rank, const HalvingPlan& plan) {
  HalvingResult result;
  result.ready = plan.kept;
  StepId given = plan.given;
  StepId buffer_free[2] = {plan.free, plan.free};
  int turn = 0;
  for (int distance = tree.firstDistance(), level = 0; distance >= 1; distance /= 2, ++level) {
    const int peer = rank ^ distance;
    const std::uint64_t tag = plan.first_tag + static_cast<std::uint64_t>(level);
    const Slice kept = blocksAt(plan.bounds, blocksKept(rank, distance), distance);
    const Slice other = blocksAt(plan.bounds, blocksGiven(rank, distance), distance);
    const Form mine = tree.formAt(rank, distance);
    const Form theirs = tree.formAt(peer, distance);

    const Region source = mine == Form::kElement ? builder.elements(plan.elements, other)
                                                 : builder.accumulators(plan.accumulators, other);
    std::size_t bit = 0;
    while ((1 << bit) < distance) ++bit;
    result.sent[bit] = builder.send(peer, tag, source, {given});

    const std::size_t count = kept.end - kept.begin;
    const Region buffer = builder.inForm(plan.buffers[turn], Slice{0, count}, theirs);
    const StepId got = builder.receive(peer, tag, buffer, {buffer_free[turn]});
    const StepId combined = builder.reduce(buffer, theirs, builder.accumulators(plan.accumulators, kept), count,
                                           /*target_first=*/rank < peer, {got, result.ready});
    if (combined != kNoStep) {
      result.ready = combined;
      buffer_free[turn] = combined;
    }
    given = result.ready;
    turn ^= 1;
  }
  return result;
}

}  // namespace trainmover
