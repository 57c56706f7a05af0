// The builders behind buildSchedule(), one file each. Internal to collectives/: called by schedule.cc only, with a
// shape it has validated.
#pragma once

#include "collectives/schedule.h"

namespace trainmover {

Schedule buildAllReduce(const Shape& shape);
Schedule buildReduce(const Shape& shape);
Schedule buildReduceScatter(const Shape& shape);
Schedule buildAllGather(const Shape& shape);
Schedule buildBroadcast(const Shape& shape);
Schedule buildGather(const Shape& shape);
Schedule buildScatter(const Shape& shape);
Schedule buildBarrier(const Shape& shape);

/// Groups of up to kDirectSize.
Schedule buildAllToAllDirect(const Shape& shape);

/// Throws std::invalid_argument, saying what was found and what was expected, for a shape that contradicts itself.
void validateShape(const Shape& shape);

}  // namespace trainmover
