// The 32 bytes of a frame header; see frame.h. Called by runtime/channel.cc and runtime/control_plane.cc.
//
//   u16 magic, u8 kind, u8 class, u32 generation, u64 key, u64 bytes, u64 address; little endian
//
// `address` is reserved, so zero, in every kind but kRequest.
#include "wire/frame.h"

#include <string>

#include "wire/little_endian.h"

namespace trainmover {
namespace {

constexpr std::uint16_t kMagic = 0x4d54;  // "TM" as bytes on the wire

/// The most that `bytes` of a frame of this kind may say.
std::uint64_t bytesMaxOf(FrameKind kind) {
  switch (kind) {
    case FrameKind::kEager:
      return kEagerBytesMax;
    case FrameKind::kRequest:
    case FrameKind::kData:
      return kMessageBytesMax;
    case FrameKind::kAbort:
      return kAbortReasonBytesMax;
    case FrameKind::kNote:
      return kNoteBytesMax;
    case FrameKind::kGrant:
    case FrameKind::kDone:
    case FrameKind::kCredit:
    case FrameKind::kHeartbeat:
    case FrameKind::kGoodbye:
    case FrameKind::kMoved:
      return 0;
  }
  return 0;
}

[[noreturn]] void refuse(const char* field, std::uint64_t found, const std::string& expected) {
  throw FrameError(std::string("frame header: found ") + field + " " + std::to_string(found) + ", expected " +
                   expected + "; the stream is out of step or the peer is of another release, close it");
}

}  // namespace

std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header) {
  std::array<std::uint8_t, kFrameHeaderBytes> bytes;
  std::uint8_t* const at = bytes.data();
  storeLittleEndian(at, kMagic);
  at[2] = static_cast<std::uint8_t>(header.kind);
  at[3] = static_cast<std::uint8_t>(header.message_class);
  storeLittleEndian(at + 4, header.generation);
  storeLittleEndian(at + 8, header.key);
  storeLittleEndian(at + 16, header.bytes);
  storeLittleEndian(at + 24, header.address);
  return bytes;
}

FrameHeader decode(const std::uint8_t* header) {
  const auto magic = loadLittleEndian<std::uint16_t>(header);
  if (magic != kMagic) refuse("magic number", magic, std::to_string(kMagic));
  if (header[2] < static_cast<std::uint8_t>(FrameKind::kEager) ||
      header[2] > static_cast<std::uint8_t>(FrameKind::kNote)) {
    refuse("kind", header[2], "1 to 11");
  }
  if (header[3] > static_cast<std::uint8_t>(FrameClass::kPointToPoint)) refuse("class", header[3], "0 or 1");
  FrameHeader frame;
  frame.kind = static_cast<FrameKind>(header[2]);
  frame.message_class = static_cast<FrameClass>(header[3]);
  frame.generation = loadLittleEndian<std::uint32_t>(header + 4);
  frame.key = loadLittleEndian<std::uint64_t>(header + 8);
  frame.bytes = loadLittleEndian<std::uint64_t>(header + 16);
  frame.address = loadLittleEndian<std::uint64_t>(header + 24);
  const std::uint64_t bytes_max = bytesMaxOf(frame.kind);
  if (frame.bytes > bytes_max) refuse("bytes", frame.bytes, "at most " + std::to_string(bytes_max));
  if (frame.address != 0 && frame.kind != FrameKind::kRequest) refuse("address", frame.address, "0");
  return frame;
}

}  // namespace trainmover
