// See topology.h. Called by the builders' tests, and by the runtime when it plans which links a switch touches.
#include "collectives/topology.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trainmover {

std::vector<int> peersOf(int size, int rank) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw std::invalid_argument("peersOf: rank " + std::to_string(rank) + " of a group of " + std::to_string(size) +
                                "; expected 0 <= rank < size");
  }
  std::vector<int> peers;
  if (size <= kDirectSize) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) peers.push_back(peer);
    }
    return peers;
  }
  for (long distance = 1; distance < size; distance *= 2) {
    peers.push_back(static_cast<int>((rank + distance) % size));
    peers.push_back(static_cast<int>((rank - distance + size) % size));
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace trainmover
