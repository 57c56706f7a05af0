// Tests of collectives/topology.h.
#include "collectives/topology.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace trainmover {
namespace {

TEST(peers_are_few_and_mutual_in_all_groups_to_1024) {
  for (int size = 1; size <= 1024; ++size) {
    const double most = 2 * std::log2(size) + 2;
    std::vector<std::vector<int>> peers;
    for (int rank = 0; rank < size; ++rank) {
      peers.push_back(peersOf(size, rank));
      CHECK(static_cast<double>(peers.back().size()) <= most);
      CHECK(std::is_sorted(peers.back().begin(), peers.back().end()));
      CHECK(std::adjacent_find(peers.back().begin(), peers.back().end()) == peers.back().end());
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int peer : peers[static_cast<std::size_t>(rank)]) {
        CHECK(peer >= 0 && peer < size && peer != rank);
        const std::vector<int>& theirs = peers[static_cast<std::size_t>(peer)];
        CHECK(std::binary_search(theirs.begin(), theirs.end(), rank));
      }
    }
  }
}

TEST(groups_up_to_the_direct_size_are_linked_each_to_each) {
  for (int size = 1; size <= kDirectSize; ++size) {
    for (int rank = 0; rank < size; ++rank) CHECK_EQ(peersOf(size, rank).size(), static_cast<std::size_t>(size - 1));
  }
}

TEST(larger_groups_are_linked_by_powers_of_two_both_ways) {
  CHECK(peersOf(9, 0) == std::vector<int>({1, 2, 4, 5, 7, 8}));
  CHECK(peersOf(16, 3) == std::vector<int>({1, 2, 4, 5, 7, 11, 15}));
}

TEST(peers_of_a_rank_outside_the_group_are_refused) {
  CHECK_THROWS(peersOf(0, 0), std::invalid_argument);
  CHECK_THROWS(peersOf(4, 4), std::invalid_argument);
  CHECK_THROWS(peersOf(4, -1), std::invalid_argument);
}

}  // namespace
}  // namespace trainmover
