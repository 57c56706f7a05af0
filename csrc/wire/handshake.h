// The handshake that opens every connection of the data plane, as a pure state machine: bytes in, bytes and a verdict
// out. No sockets, clock or random numbers: nonces are passed in. runtime/control_plane.cc drives it.
//
//   acceptor   CHALLENGE  protocol version, nonce A
//   initiator  HELLO      who calls whom, for what, under which job; nonce I; HMAC over nonce A and the hello
//   acceptor   WELCOME    verdict and reason; HMAC over both nonces and the welcome
//   initiator  one byte: it has installed its side; descriptors come along where they are due
//
// A HELLO whose HMAC is wrong is answered with nothing at all: the connection is closed. Everything else that is wrong
// is refused with a reason. Multi-byte numbers are little endian. Every message: u32 length (of what follows), u8 type.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/types.h"

namespace trainmover {

constexpr std::size_t kHandshakeMessageBytesMax = 1024;
constexpr std::uint16_t kProtocolVersion = 1;

using Nonce = std::array<std::uint8_t, 16>;
using Digest = std::array<std::uint8_t, 32>;

/// What a connection is for.
enum class Purpose : std::uint8_t {
  kControl = 1,  // one per pair of processes: liveness, aborts, doorbells
  kLink = 2,     // one per communicator and pair of ranks
  kSegment = 3,  // to group rank 0 of a communicator whose ranks share a machine: its shared segment
};

struct Hello {
  Purpose purpose = Purpose::kControl;
  Digest job{};                    // SHA-256 of job id and job constants (thresholds, versions): equal on all ranks
  std::uint64_t communicator = 0;  // id; 0 for kControl
  Generation generation = 0;
  std::int32_t from_rank = 0;  // global ranks
  std::int32_t to_rank = 0;
  std::uint64_t from_incarnation = 0;  // of the processes, as the directory tells them
  std::uint64_t to_incarnation = 0;
};

enum class Verdict : std::uint8_t {
  kWelcome = 0,
  kWrongJob = 1,          // other job or other constants: for good
  kWrongRank = 2,         // not the rank that was called: for good
  kWrongIncarnation = 3,  // that process is gone, or the caller is: for good
  kStaleGeneration = 4,   // the caller is behind
  kDuplicate = 5,         // such a connection is live, or the acceptor's own attempt goes first
  kUnknown = 6,           // no such communicator (any more)
  kBusy = 7,              // too many connections wait here; try again
};
const char* nameOf(Verdict verdict);

struct Welcome {
  Verdict verdict = Verdict::kWelcome;
  std::string reason;  // at most 256 bytes, for the log of the other side
};

/// The side that was connected to. Bytes it has not consumed belong to what follows the handshake.
class AcceptorHandshake {
 public:
  AcceptorHandshake(std::string token, Nonce nonce);
  /// What to send first.
  std::vector<std::uint8_t> challenge() const;
  /// Takes bytes as they come, consumes at most the HELLO, returns how many of `data` it consumed. Throws
  /// HandshakeError (below) on anything malformed, oversized, of another version or wrongly signed: close at once.
  std::size_t receive(const std::uint8_t* data, std::size_t bytes);
  /// The authenticated HELLO, once there is one.
  const std::optional<Hello>& hello() const { return hello_; }
  /// The answer to it. Legal once hello() is there.
  std::vector<std::uint8_t> welcome(const Welcome& welcome) const;
  /// Bytes of an unfinished message that are held here: never more than one message.
  std::size_t heldBytes() const { return pending_.size(); }

 private:
  std::string token_;
  Nonce nonce_;
  Nonce initiator_nonce_{};
  std::vector<std::uint8_t> pending_;
  std::optional<Hello> hello_;
};

/// The side that connected.
class InitiatorHandshake {
 public:
  InitiatorHandshake(std::string token, Nonce nonce, Hello hello);
  /// Takes bytes as they come, consumes at most one message, returns how many of `data` it consumed. After a CHALLENGE,
  /// hello() has bytes to send; after a WELCOME, welcome() is there. Throws as above.
  std::size_t receive(const std::uint8_t* data, std::size_t bytes);
  /// The signed HELLO once the CHALLENGE has come, else empty.
  const std::vector<std::uint8_t>& hello() const { return signed_hello_; }
  const std::optional<Welcome>& welcome() const { return welcome_; }

  /// Bytes of an unfinished message that are held here: never more than one message.
  std::size_t heldBytes() const { return pending_.size(); }

 private:
  std::size_t receiveChallenge(const std::uint8_t* data, std::size_t bytes);
  std::size_t receiveWelcome(const std::uint8_t* data, std::size_t bytes);

  std::string token_;
  Nonce nonce_;
  Hello hello_;
  Nonce acceptor_nonce_{};
  std::vector<std::uint8_t> pending_;
  std::vector<std::uint8_t> signed_hello_;
  std::optional<Welcome> welcome_;
};

/// The other side does not speak our protocol, or does not know the token. Deliberately says little.
class HandshakeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace trainmover
