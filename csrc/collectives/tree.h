// The two trees. ReductionTree: who combines what with whom under ReductionOrder::kTree, for doubling, halving and
// reducing to a root alike. RootedTree: the binomial tree by which data goes from a root to all and back. Internal to
// collectives/.
#pragma once

#include "base/types.h"

namespace trainmover {

/// The ranks below `powerOfTwo()` make up the tree; each rank r from there on, an *extra*, first gives its contribution
/// to r - powerOfTwo(), which is then *folded*. At distance d = powerOfTwo() / 2 ... 1, r and r ^ d combine theirs.
class ReductionTree {
 public:
  explicit ReductionTree(int size) : size_(size) {
    while (power_of_two_ <= size_ / 2) power_of_two_ *= 2;
  }

  int powerOfTwo() const { return power_of_two_; }
  int firstDistance() const { return power_of_two_ / 2; }
  bool isExtra(int rank) const { return rank >= power_of_two_; }
  bool isFolded(int rank) const { return rank < size_ - power_of_two_; }

  /// The form in which `rank` gives what it holds at `distance`: its own elements as they are, unless it has combined
  /// them with another's before.
  Form formAt(int rank, int distance) const {
    return distance == firstDistance() && !isFolded(rank) ? Form::kElement : Form::kAccumulator;
  }

 private:
  int size_;
  int power_of_two_ = 1;
};

/// Ranks counted from the root. `v` stands for the ranks [v, v + span(v)), which lie below it in the tree; its parent
/// is v without its lowest bit, its children v + 2^k: all along links of topology.h, whatever the root and size.
class RootedTree {
 public:
  RootedTree(int size, int root) : size_(size), root_(root) {}

  int relative(int rank) const { return rank >= root_ ? rank - root_ : rank - root_ + size_; }
  int absolute(int v) const { return v < size_ - root_ ? v + root_ : v + root_ - size_; }
  int parent(int v) const { return v & (v - 1); }

  /// Distance to the child of `v` whose ranks are the most; 0 if it has none. Halve it for the others, largest first.
  int firstChildDistance(int v) const {
    const int limit = v == 0 ? size_ : (v & -v);
    int distance = 0;
    for (int next = 1; next < limit && v + next < size_; next *= 2) distance = next;
    return distance;
  }
  int span(int v) const {
    const int lowest = v & -v;
    return v == 0 || lowest > size_ - v ? size_ - v : lowest;
  }
  /// The child of `v` that is, or stands for, `below`: another rank of those that `v` stands for.
  int childTowards(int v, int below) const {
    int distance = 1;
    while (distance <= (below - v) / 2) distance *= 2;
    return v + distance;
  }

 private:
  int size_;
  int root_;
};

}  // namespace trainmover
