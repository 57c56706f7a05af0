// From a call with buffers to the shape of a collective, and what a call yields when nobody else is there. Pure.
#pragma once

#include "collectives/schedule.h"
#include "runtime/communicator.h"

namespace trainmover {

/// Throws std::invalid_argument when the buffers contradict the kind, or sizes each other.
Shape shapeOf(const CollectiveCall& call, int size, int rank);

/// Isolated mode: fills the outputs as if every rank had given what this one gives.
void fillIsolated(const CollectiveCall& call, int size, int rank);

}  // namespace trainmover
