// What a link throws when the other end is gone; the runtime turns it into PeerLost, since it knows whom it lost.
#pragma once

#include <stdexcept>

namespace trainmover {

class LinkClosed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace trainmover
