// What a link throws when the other end is gone; the runtime turns it into PeerLost, since it knows whom it lost.
#pragma once

#include <stdexcept>

namespace trainmover {

class LinkClosed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The same of one rank of a shared segment, which has no link of its own.
class RankClosed : public LinkClosed {
 public:
  RankClosed(int group_rank, const char* why) : LinkClosed(why), group_rank_(group_rank) {}
  int groupRank() const noexcept { return group_rank_; }

 private:
  int group_rank_;
};

}  // namespace trainmover
