// What a peer that breaks the protocol can do to a channel: end it with one of three errors, and nothing else.
#include <random>

#include "base/errors.h"
#include "link_ends.h"
#include "runtime/channel.h"

namespace trainmover::check {
namespace {

constexpr std::uint32_t kGeneration = 7;

class Ignored final : public TransferListener {
 public:
  void transferEnded(Transfer&) override { ++ended; }
  int ended = 0;
};

/// A channel with a few transfers outstanding, and the bare link at its other end.
struct Target {
  explicit Target(LinkKind kind)
      : pair(kind),
        channel(pair.b.takeLink(), 0, kGeneration, stats, [](FrameClass, std::uint64_t) { return nullptr; }) {
    for (std::size_t i = 0; i < 8; ++i) {
      memory.emplace_back(i * 9000);
      transfers.emplace_back();
    }
    for (std::size_t i = 0; i < 8; ++i) {
      Transfer& transfer = transfers[i];
      transfer.is_send = i % 2 == 0;
      transfer.key = i / 2;
      transfer.data = memory[i].data();
      transfer.bytes = memory[i].size();
      transfer.exact = false;
      transfer.listener = &listener;
      transfer.is_send ? channel.send(transfer) : channel.receive(transfer);
    }
  }

  /// Sends `bytes` and lets the channel read them; true when it ended with one of the errors it may end with.
  bool take(const std::vector<std::uint8_t>& bytes) {
    std::size_t at = 0;
    std::uint8_t sink[4096];
    const std::uint64_t deadline_ms = monotonicMs() + 10'000;
    try {
      while (at < bytes.size()) {
        CHECK(monotonicMs() < deadline_ms);
        const IoSlice part{bytes.data() + at, bytes.size() - at};
        at += pair.a.link().write(&part, 1);
        while (pair.a.link().read(sink, sizeof sink) > 0) {
        }
        channel.progress();
      }
      for (int i = 0; i < 5; ++i) channel.progress();
    } catch (const FrameError&) {
      return true;
    } catch (const LinkClosed&) {
      return true;
    } catch (const CollectiveMismatch&) {
      return true;
    }
    return false;
  }

  LinkPair pair;
  Traffic stats;
  Ignored listener;
  std::vector<std::vector<unsigned char>> memory;
  std::vector<Transfer> transfers;
  Channel channel;
};

FrameHeader randomHeader(std::mt19937_64& random) {
  const std::uint64_t numbers[] = {0, 1, 2, 3, 9000, 16384, 27000, 45000, 512 << 10, std::uint64_t{1} << 40};
  FrameHeader header;
  header.kind = static_cast<FrameKind>(1 + random() % (random() % 8 == 0 ? 9 : 6));
  header.message_class = static_cast<FrameClass>(random() % 2);
  header.generation = random() % 32 == 0 ? kGeneration - 1 : kGeneration;
  header.key = numbers[random() % (random() % 4 == 0 ? 10 : 4)];
  const bool has_bytes =
      header.kind == FrameKind::kEager || header.kind == FrameKind::kRequest || header.kind == FrameKind::kData;
  if (has_bytes) header.bytes = numbers[random() % 10];
  if (header.kind == FrameKind::kEager) header.bytes %= kEagerBytesMax + 1;
  if (header.kind == FrameKind::kRequest && random() % 2 == 0) header.address = random();
  return header;
}

TEST(random_bytes_end_a_channel_with_a_frame_error) {
  std::mt19937_64 random(1);
  int errors = 0;
  for (int run = 0; run < 300; ++run) {
    Target target(kLinkKinds[run % 3]);
    std::vector<std::uint8_t> bytes(1 + random() % 5000);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    errors += target.take(bytes) ? 1 : 0;
  }
  CHECK(errors > 280);  // all but those too short for a header
}

TEST(random_frames_end_a_channel_with_an_error_it_may_end_with_or_not_at_all) {
  std::mt19937_64 random(2);
  int errors = 0;
  for (int run = 0; run < 1500; ++run) {
    Target target(kLinkKinds[run % 3]);
    std::vector<std::uint8_t> bytes;
    for (std::uint64_t frames = 1 + random() % 12; frames-- > 0;) {
      const FrameHeader header = randomHeader(random);
      const auto encoded = encode(header);
      bytes.insert(bytes.end(), encoded.begin(), encoded.end());
      if (header.kind == FrameKind::kEager || header.kind == FrameKind::kData) {
        bytes.resize(bytes.size() + std::min<std::uint64_t>(header.bytes, 60'000), 0x55);
      }
    }
    errors += target.take(bytes) ? 1 : 0;
  }
  CHECK(errors > 500);
  CHECK(errors < 1500);
}

std::vector<std::uint8_t> many(const FrameHeader& header, std::size_t count) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < count; ++i) {
    FrameHeader one = header;
    one.key += i;
    one.generation = kGeneration;
    const auto encoded = encode(one);
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
    if (header.kind == FrameKind::kEager) bytes.resize(bytes.size() + header.bytes);
  }
  return bytes;
}

TEST(peer_that_floods_a_channel_with_messages_nobody_wants_is_cut_off) {
  for (const LinkKind kind : kLinkKinds) {
    FrameHeader header;
    header.message_class = FrameClass::kPointToPoint;
    header.key = 1000;
    header.kind = FrameKind::kEager;
    header.bytes = 1000;
    CHECK(Target(kind).take(many(header, kEagerWindowBytes / 1000 + 2)));
    // Empty ones take memory too.
    header.bytes = 0;
    CHECK(Target(kind).take(many(header, kUnexpectedMax + 2)));
    header.kind = FrameKind::kRequest;
    header.bytes = 1'000'000;
    CHECK(Target(kind).take(many(header, kUnexpectedMax + 2)));
  }
}

TEST(frames_out_of_turn_are_refused) {
  for (const LinkKind kind : kLinkKinds) {
    for (const FrameKind out_of_turn : {FrameKind::kGrant, FrameKind::kDone, FrameKind::kData, FrameKind::kCredit,
                                        FrameKind::kHeartbeat, FrameKind::kGoodbye}) {
      FrameHeader header;
      header.kind = out_of_turn;
      header.key = out_of_turn == FrameKind::kCredit ? std::uint64_t{1} << 40 : 4711;
      CHECK(Target(kind).take(many(header, 1)));
    }
    // A grant that comes twice.
    FrameHeader grant;
    grant.kind = FrameKind::kGrant;
    grant.key = 0;
    auto bytes = many(grant, 1);
    const auto again = many(grant, 1);
    bytes.insert(bytes.end(), again.begin(), again.end());
    CHECK(Target(kind).take(bytes));
  }
}

TEST(address_where_nothing_lies_ends_the_channel_not_the_process) {
  Target target(LinkKind::kShm);
  FrameHeader header;
  header.kind = FrameKind::kRequest;
  header.key = 2;
  header.bytes = 20'000;
  header.address = 64;
  CHECK(target.take(many(header, 1)));
}

}  // namespace
}  // namespace trainmover::check
