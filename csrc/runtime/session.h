// One connection while the control plane has it: from accept or connect through the handshake to its purpose.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "base/descriptor.h"
#include "base/mapping.h"
#include "base/types.h"
#include "wire/frame.h"
#include "wire/handshake.h"

namespace trainmover {

/// What a connection is for; there is one at most for each. `generation`: that of the pair; of control channels 0, but
/// for one that is prepared for a switch, which bears the switch's until it is committed.
struct Key {
  Purpose purpose = Purpose::kControl;
  std::uint64_t communicator = 0;
  Generation generation = 0;
  int peer = -1;  // global rank
  bool operator<(const Key& other) const {
    return std::tie(purpose, communicator, generation, peer) <
           std::tie(other.purpose, other.communicator, other.generation, other.peer);
  }
};

enum class SessionState : std::uint8_t {
  kConnecting,   // initiator: connect under way
  kHandshaking,  // either
  kParked,       // acceptor: authenticated, but what it asks for is not there yet
  kPassing,      // acceptor: has said welcome, waits for the confirmation; until then nothing is installed here
  kControl,      // established control channel
  kLeaving,      // its last words are on their way, and nothing it says counts
};

struct Session {
  std::uint64_t id = 0;
  Descriptor socket;
  bool local = false;  // unix socket
  bool initiator = false;
  SessionState state = SessionState::kHandshaking;
  Key key;
  std::uint64_t deadline_ms = 0;
  std::uint64_t peer_incarnation = 0;
  bool authenticated = false;
  bool hello_sent = false;
  std::optional<AcceptorHandshake> acceptor;
  std::optional<InitiatorHandshake> calling;
  std::vector<Descriptor> received;  // descriptors that came along
  Mapping segment;                   // acceptor of a local link: what it will use once confirmed
  // Control channels.
  std::vector<std::uint8_t> incoming, outgoing;
  std::uint64_t last_heard_ms = 0, last_sent_ms = 0;
};

}  // namespace trainmover
