// All-to-all. Groups of up to kDirectSize exchange directly: buildSchedule(). In larger ones the links are fewer than
// the pairs, so blocks are stored and forwarded: the block from rank s to rank s + delta (modulo size) travels 2^k in
// round k for each bit k of delta, lowest first. Each rank knows its own sizes only, and must know those of what it
// forwards, so the runtime (runtime/communicator.cc) runs two schedules, one after the other:
//
//   own = `size` std::uint64_t: own[delta] = shape.pieces[(rank + delta) % size]
//   run buildAllToAllSizes(shape); its input pieces are the caller's and, after them, as piece `size`, own
//   sizes = the first allToAllSizeCount(size) std::uint64_t of its scratch, once it has ended
//   run buildAllToAllData(shape, sizes) with the caller's pieces as input and output
//
// The messages of the two must not be taken for each other: their keys must differ in more than the tag. When it is
// known that all blocks of all ranks have one size, the first is left out: sizes = allToAllSizeCount(size) times that
// size.
//
// Pure. Scratch of the second: what is on its way through this rank, about log2(size) / 2 - 1 times the bytes of its
// own pieces when they are even, and what is packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/schedule.h"

namespace trainmover {

/// Number of blocks that each rank receives over all rounds.
std::size_t allToAllSizeCount(int size);

/// Tells each rank the sizes of all blocks it will receive, in the order in which it will receive them: by round, then
/// by delta. Messages have the same lengths on all ranks. Throws std::invalid_argument unless size > kDirectSize.
Schedule buildAllToAllSizes(const Shape& shape);

/// Moves the data. Throws CollectiveMismatch when `sizes` contradict `shape.received`: then the ranks didn't make the
/// same call. Throws std::invalid_argument unless size > kDirectSize and `sizes` are allToAllSizeCount(size).
Schedule buildAllToAllData(const Shape& shape, const std::vector<std::uint64_t>& sizes);

}  // namespace trainmover
