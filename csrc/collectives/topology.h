// Who is linked to whom (architecture: topology). Pure. Rank r of N is linked to r + 2^k and r - 2^k modulo N, which
// covers rings, doubling, halving, dissemination and binomial trees from any root with at most 2 ceil(log2 N) peers;
// groups of up to kDirectSize are linked directly, each to each, which is within the same bound.
#pragma once

#include <vector>

namespace trainmover {

constexpr int kDirectSize = 8;

/// Peers that collectives of any kind may use from `rank`, ascending. At most 2 log2(size) + 2.
std::vector<int> peersOf(int size, int rank);

}  // namespace trainmover
