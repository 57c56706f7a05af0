// One message under way: what an operation gives to a channel, and how it hears that the message has arrived or gone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/frame.h"

namespace trainmover {

struct Transfer;

/// Told, under the engine's lock, when a transfer ends. May post further transfers.
class TransferListener {
 public:
  virtual void transferEnded(Transfer& transfer) = 0;

 protected:
  ~TransferListener() = default;
};

/// Owned by the operation, which outlives its channels' interest in it: channels are destroyed first on an abort.
struct Transfer {
  FrameClass message_class = FrameClass::kCollective;
  bool is_send = false;
  int peer = -1;          // group rank; set to the sender's when a receive from any source is matched
  std::uint64_t key = 0;  // equal at both ends
  void* data = nullptr;
  std::size_t bytes = 0;  // send: size of the message; receive: room, then size of what came
  bool exact = true;      // receive: a message of another size is an error, not only a larger one
  TransferListener* listener = nullptr;
  std::uint32_t index = 0;  // the listener's own
  std::size_t fetched = 0;  // the channel's own: bytes read from the peer's memory so far
};

}  // namespace trainmover
