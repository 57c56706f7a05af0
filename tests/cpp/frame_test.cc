// wire/frame.cc: what is encoded decodes to the same; each field that is out of bounds is refused.
#include "wire/frame.h"

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace trainmover;  // NOLINT: a test of one namespace

constexpr std::uint64_t kAny = ~std::uint64_t{0};

struct KindLimits {
  FrameKind kind;
  std::uint64_t bytes_max;
  std::uint64_t address_max;
};
constexpr KindLimits kKinds[] = {{FrameKind::kEager, kEagerBytesMax, 0},
                                 {FrameKind::kRequest, kMessageBytesMax, kAny},
                                 {FrameKind::kGrant, 0, 0},
                                 {FrameKind::kData, kMessageBytesMax, 0},
                                 {FrameKind::kDone, 0, 0},
                                 {FrameKind::kCredit, 0, 0},
                                 {FrameKind::kHeartbeat, 0, 0},
                                 {FrameKind::kAbort, kAbortReasonBytesMax, 0},
                                 {FrameKind::kGoodbye, 0, 0},
                                 {FrameKind::kMoved, 0, 0},
                                 {FrameKind::kNote, kNoteBytesMax, 0}};

FrameHeader headerOf(FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  header.message_class = FrameClass::kPointToPoint;
  header.generation = 0x89abcdef;
  header.key = 0xfedcba9876543210;
  return header;
}

TEST(frames_of_every_kind_come_back_as_they_were) {
  for (const KindLimits& limits : kKinds) {
    for (const std::uint64_t bytes : {std::uint64_t{0}, limits.bytes_max / 2, limits.bytes_max}) {
      FrameHeader header = headerOf(limits.kind);
      header.bytes = bytes;
      header.address = limits.address_max;
      const FrameHeader decoded = decode(encode(header).data());
      CHECK_EQ(decoded.kind, header.kind);
      CHECK_EQ(decoded.message_class, header.message_class);
      CHECK_EQ(decoded.generation, header.generation);
      CHECK_EQ(decoded.key, header.key);
      CHECK_EQ(decoded.bytes, header.bytes);
      CHECK_EQ(decoded.address, header.address);
    }
  }
}

TEST(the_bytes_on_the_wire_are_little_endian_and_fixed) {
  FrameHeader header = headerOf(FrameKind::kRequest);
  header.bytes = 0x0102030405;
  header.address = 0x1112131415161718;
  const std::array<std::uint8_t, kFrameHeaderBytes> expected = {
      'T',  'M',  2,    1,    0xef, 0xcd, 0xab, 0x89, 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe,
      0x05, 0x04, 0x03, 0x02, 0x01, 0,    0,    0,    0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11};
  CHECK(encode(header) == expected);
}

TEST(more_bytes_than_its_kind_may_have_are_refused) {
  for (const KindLimits& limits : kKinds) {
    for (const std::uint64_t bytes : {limits.bytes_max + 1, std::uint64_t{1} << 41, kAny}) {
      FrameHeader header = headerOf(limits.kind);
      header.bytes = bytes;
      CHECK_THROWS(decode(encode(header).data()), FrameError);
    }
  }
}

TEST(an_address_is_refused_in_all_kinds_but_requests) {
  for (const KindLimits& limits : kKinds) {
    if (limits.address_max != 0) continue;
    FrameHeader header = headerOf(limits.kind);
    header.address = 1;
    CHECK_THROWS(decode(encode(header).data()), FrameError);
  }
}

TEST(every_wrong_magic_number_kind_and_class_is_refused) {
  const auto good = encode(headerOf(FrameKind::kData));
  for (const std::size_t at : {0, 1, 2, 3}) {
    for (int value = 0; value < 256; ++value) {
      auto bytes = good;
      bytes[at] = static_cast<std::uint8_t>(value);
      const bool valid = bytes[at] == good[at] || (at == 2 && value >= 1 && value <= 11) || (at == 3 && value <= 1);
      if (valid) {
        decode(bytes.data());
      } else {
        CHECK_THROWS(decode(bytes.data()), FrameError);
      }
    }
  }
}

TEST(the_error_says_what_was_found_and_expected) {
  auto bytes = encode(headerOf(FrameKind::kData));
  bytes[2] = 77;
  try {
    decode(bytes.data());
    CHECK(false);
  } catch (const FrameError& error) {
    CHECK(std::string(error.what()).find("found kind 77, expected 1 to 11") != std::string::npos);
  }
}

TEST(headers_may_lie_at_odd_addresses) {
  const auto bytes = encode(headerOf(FrameKind::kGrant));
  std::vector<std::uint8_t> memory(kFrameHeaderBytes + 1);
  std::copy(bytes.begin(), bytes.end(), memory.begin() + 1);
  CHECK_EQ(decode(memory.data() + 1).key, 0xfedcba9876543210U);
}

}  // namespace
