// The errors of the data plane. Each says what was found, what was expected and what to do; bindings.cc translates each
// to the Python class of the same name, once.
#pragma once

#include <stdexcept>
#include <string>

#include "base/types.h"

namespace trainmover {

/// Base of all below.
class CollectiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The process of `globalRank()` died or left while this operation waited for it directly.
class PeerLost : public CollectiveError {
 public:
  PeerLost(int global_rank, const std::string& why)
      : CollectiveError("global rank " + std::to_string(global_rank) + " was lost: " + why),
        global_rank_(global_rank) {}
  int globalRank() const noexcept { return global_rank_; }

 private:
  int global_rank_;
};

/// Operations of this generation were aborted, by a call here or because some rank was lost (`culprit()`, or -1).
class CollectiveAborted : public CollectiveError {
 public:
  CollectiveAborted(Generation generation, int culprit, const std::string& why)
      : CollectiveError("collectives of generation " + std::to_string(generation) + " were aborted: " + why),
        generation_(generation),
        culprit_(culprit) {}
  Generation generation() const noexcept { return generation_; }
  int culprit() const noexcept { return culprit_; }

 private:
  Generation generation_;
  int culprit_;
};

/// A peer gave no sign of life for the limit, or an operation did not end within its own time-out.
class CollectiveTimeout : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

/// Ranks of one communicator did not make the same call: other operation, size, type or root.
class CollectiveMismatch : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

/// A system call on a link, segment or listener failed for a reason that is not the peer's death.
class TransportError : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

/// The other side said no for good: another job, other constants, not the rank we took it for.
class HandshakeRefused : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

/// A link was to be prepared, committed or aborted out of turn; nothing was changed.
class SwitchError : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

}  // namespace trainmover
