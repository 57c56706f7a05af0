// Cutting memory for the ranks of a group. Used by the backend and the direct communicator.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/communicator.h"

namespace trainmover {

/// Cuts `whole`, whose bytes are a multiple of `pieces`, into equal parts and appends them to `parts`.
inline void appendEqualParts(std::vector<Buffer>& parts, Buffer whole, int pieces) {
  const std::size_t bytes = whole.bytes / static_cast<std::size_t>(pieces);
  parts.reserve(parts.size() + static_cast<std::size_t>(pieces));
  for (int piece = 0; piece < pieces; ++piece) {
    parts.push_back(Buffer{static_cast<char*>(whole.data) + bytes * static_cast<std::size_t>(piece), bytes});
  }
}

}  // namespace trainmover
