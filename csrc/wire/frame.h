// The header before every message on a link, and before every message on a control channel: fixed size, checked field
// by field before anything is believed. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "base/types.h"

namespace trainmover {

constexpr std::size_t kFrameHeaderBytes = 32;

enum class FrameKind : std::uint8_t {
  kEager = 1,      // key; `bytes` of payload follow
  kRequest = 2,    // key, bytes, address: "I have `bytes` for `key`"; the receiver answers kGrant, or fetches and kDone
  kGrant = 3,      // id: "send the payload of request `id`"
  kData = 4,       // id; `bytes` of payload follow: the whole payload of the request
  kDone = 5,       // id: "fetched; the memory of request `id` is yours again"
  kCredit = 6,     // key: so many eager bytes (headers included) were taken out of the receiver's buffer
  kHeartbeat = 7,  // control channels only
  kAbort = 8,      // control: key = culprit's global rank or -1, in 32 bits, and flags; `bytes` of reason follow
  kGoodbye = 9,    // control: the sender leaves on purpose
  kMoved = 10,     // control: key = generation in which one of the two ranks changed hands; nothing more will come
  kNote = 11,      // control: key = generation that the note is about; `bytes` of payload follow
};

/// Which space `key` is in: collectives number their messages, point-to-point uses the caller's tags.
enum class FrameClass : std::uint8_t { kCollective = 0, kPointToPoint = 1 };

struct FrameHeader {
  FrameKind kind = FrameKind::kEager;
  FrameClass message_class = FrameClass::kCollective;
  std::uint32_t generation = 0;  // low 32 bits: a frame of another generation is never parsed further
  std::uint64_t key = 0;         // matching key, the id of a request, or a number of bytes (kCredit)
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // kRequest: where the payload lies in the sender's process
};

/// What came is no frame header of ours: the stream is lost, close the connection.
class FrameError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header);

/// Throws FrameError (std::runtime_error) on a wrong magic number, unknown kind or class, non-zero reserved bits, a
/// payload over the limits: eager kEagerBytesMax, data and request kMessageBytesMax, abort kAbortReasonBytesMax, note
/// kNoteBytesMax, others 0.
FrameHeader decode(const std::uint8_t* header);

constexpr std::uint64_t kEagerBytesMax = std::uint64_t{128} << 10;
constexpr std::uint64_t kMessageBytesMax = std::uint64_t{1} << 40;
constexpr std::uint64_t kAbortReasonBytesMax = 512;
constexpr std::uint64_t kNoteBytesMax = std::uint64_t{64} << 10;

}  // namespace trainmover
