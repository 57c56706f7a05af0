// Fuzzes decode() of wire/frame.h: whatever 32 bytes come, it throws FrameError or returns a header within the limits
// that encodes to the same bytes. Started by test_cpp.py: seconds, seed.
#include "fuzzing.h"
#include "wire/frame.h"

namespace {

using namespace trainmover;  // NOLINT: a test of one namespace
using fuzzing::Bytes;
using fuzzing::require;

std::vector<Bytes> seedMessages() {
  std::vector<Bytes> seeds;
  for (int kind = 1; kind <= 11; ++kind) {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(kind);
    header.generation = 7;
    header.key = 0x0102030405060708;
    if (header.kind == FrameKind::kRequest) header.address = 0x7f0012345678;
    if (header.kind == FrameKind::kRequest || header.kind == FrameKind::kData) header.bytes = 1 << 20;
    const auto bytes = encode(header);
    seeds.emplace_back(bytes.begin(), bytes.end());
  }
  return seeds;
}

void once(fuzzing::Random& random, const std::vector<Bytes>& seeds) {
  Bytes bytes = fuzzing::mutated(random, seeds);
  bytes.resize(kFrameHeaderBytes);
  try {
    const FrameHeader header = decode(bytes.data());
    const auto again = encode(header);
    require(std::equal(again.begin(), again.end(), bytes.begin()), "a header that decodes encodes to the same bytes");
    require(header.bytes <= kMessageBytesMax, "bytes are within the largest limit");
    require(header.kind != FrameKind::kEager || header.bytes <= kEagerBytesMax, "eager bytes are within their limit");
    require(header.kind != FrameKind::kNote || header.bytes <= kNoteBytesMax, "notes are within their limit");
    require(header.kind != FrameKind::kAbort || header.bytes <= kAbortReasonBytesMax, "reasons are within their limit");
  } catch (const FrameError&) {
    // What else it may do.
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Bytes> seeds = seedMessages();
  return fuzzing::run(argc, argv, [&seeds](fuzzing::Random& random) { once(random, seeds); });
}
