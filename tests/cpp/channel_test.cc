// Messages over a link: matching, flow control, what a broken or hostile peer can do. Two channels in one process, over
// every kind of link.
#include "runtime/channel.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <random>

#include "base/errors.h"
#include "link_ends.h"

namespace trainmover::check {
namespace {

constexpr std::uint32_t kGeneration = 7;

/// Counts the ends of transfers, in their order.
class Ends final : public TransferListener {
 public:
  void transferEnded(Transfer& transfer) override { order.push_back(transfer.index); }
  bool has(std::uint32_t index) const { return std::find(order.begin(), order.end(), index) != order.end(); }
  std::vector<std::uint32_t> order;
};

/// A message and its memory.
struct Message {
  Message(Ends& ends, bool is_send, std::uint64_t key, std::size_t bytes, FrameClass in = FrameClass::kPointToPoint)
      : memory(bytes) {
    transfer.message_class = in;
    transfer.is_send = is_send;
    transfer.key = key;
    transfer.data = memory.data();
    transfer.bytes = bytes;
    transfer.listener = &ends;
  }
  Message(const Message&) = delete;

  void fillWith(std::uint32_t seed) { fill(memory, seed); }
  bool isFilledWith(std::uint32_t seed, std::size_t bytes) const {
    std::vector<unsigned char> expected(bytes);
    fill(expected, seed);
    return bytes == 0 || std::memcmp(memory.data(), expected.data(), bytes) == 0;
  }
  /// Mostly by memset, which sanitizers leave fast; each part still differs from the others.
  static void fill(std::vector<unsigned char>& bytes, std::uint32_t seed) {
    for (std::size_t at = 0; at < bytes.size(); at += 61) {
      std::memset(&bytes[at], static_cast<int>((seed * 31 + at * 7 + (at >> 8)) & 255),
                  std::min<std::size_t>(61, bytes.size() - at));
    }
  }
  std::vector<unsigned char> memory;
  Transfer transfer;
};

struct Side {
  Side(std::unique_ptr<Link> link, std::uint32_t generation = kGeneration)
      : channel(std::move(link), 1, generation, stats, [this](FrameClass, std::uint64_t key) -> Transfer* {
          const auto found = std::find_if(any.begin(), any.end(), [&](auto* one) { return one->key == key; });
          if (found == any.end()) return nullptr;
          Transfer* transfer = *found;
          any.erase(found);
          return transfer;
        }) {}
  Traffic stats;
  Ends ends;
  std::vector<Transfer*> any;
  Channel channel;
};

struct Sides {
  explicit Sides(LinkKind kind) : pair(kind), a(pair.a.takeLink()), b(pair.b.takeLink()) {}

  /// Drives both until `condition`; ends the test when it never comes true.
  template <typename Condition>
  void until(Condition condition) {
    const std::uint64_t deadline_ms = monotonicMs() + 20'000;
    while (!condition()) {
      CHECK(monotonicMs() < deadline_ms);
      a.channel.progress();
      b.channel.progress();
    }
  }
  /// Drives both until nothing moves; a kernel may need a moment in between.
  void settle() {
    for (int quiet = 0; quiet < 20;) quiet = a.channel.progress() | b.channel.progress() ? 0 : quiet + 1;
  }
  LinkPair pair;
  Side a, b;
};

/// Runs `body` on every kind of link and says on which it failed.
template <typename Body>
void onEach(Body body) {
  for (const LinkKind kind : kLinkKinds) {
    try {
      body(kind);
    } catch (const Failure& failure) {
      throw Failure{nameOf(kind) + ": " + failure.what};
    }
  }
}

const std::size_t kSizes[] = {
    0, 1, 100, kEagerBesideFetchMax, kEagerBesideFetchMax + 1, kEagerBytesMax, kEagerBytesMax + 1, 200'000, 5'000'000};

TEST(messages_of_all_sizes_arrive_whether_asked_for_before_or_after) {
  onEach([](LinkKind kind) {
    for (const std::size_t bytes : kSizes) {
      for (const bool asked_before : {true, false}) {
        Sides sides(kind);
        Message sent(sides.a.ends, true, 3, bytes), got(sides.b.ends, false, 3, bytes);
        sent.fillWith(5);
        if (asked_before) sides.b.channel.receive(got.transfer);
        sides.a.channel.send(sent.transfer);
        sides.settle();
        // A short message has gone already; a long one waits in the sender's memory.
        if (!asked_before) {
          CHECK_EQ(sides.a.ends.order.size(), bytes <= sides.a.channel.eagerBytesMax() ? 1 : 0);
          CHECK_EQ(sides.b.channel.unexpectedBytes(), bytes <= sides.a.channel.eagerBytesMax() ? bytes : 0);
          sides.b.channel.receive(got.transfer);
        }
        sides.until([&] { return sides.a.ends.order.size() == 1 && sides.b.ends.order.size() == 1; });
        CHECK(got.isFilledWith(5, bytes));
        CHECK_EQ(got.transfer.bytes, bytes);
        CHECK_EQ(got.transfer.peer, 1);
        CHECK(!sides.a.channel.busy());
        CHECK(!sides.b.channel.busy());
        CHECK(sides.b.stats.bytes_received >= bytes && sides.a.stats.bytes_sent >= bytes);
      }
    }
  });
}

TEST(keys_may_be_asked_for_in_any_order_and_classes_are_apart) {
  onEach([](LinkKind kind) {
    Sides sides(kind);
    std::deque<Message> sent, got;
    for (std::uint32_t i = 0; i < 40; ++i) {
      const auto in = i % 2 == 0 ? FrameClass::kCollective : FrameClass::kPointToPoint;
      sent.emplace_back(sides.a.ends, true, i / 2, i % 3 == 0 ? 30'000 : 50 + i, in);
      sent.back().fillWith(i);
      sides.a.channel.send(sent.back().transfer);
    }
    for (std::uint32_t i = 40; i-- > 0;) {
      const auto in = i % 2 == 0 ? FrameClass::kCollective : FrameClass::kPointToPoint;
      got.emplace_back(sides.b.ends, false, i / 2, i % 3 == 0 ? 30'000 : 50 + i, in);
      sides.b.channel.receive(got.back().transfer);
      sides.settle();
    }
    sides.until([&] { return sides.b.ends.order.size() == 40 && sides.a.ends.order.size() == 40; });
    for (std::uint32_t i = 0; i < 40; ++i) CHECK(got[39 - i].isFilledWith(i, got[39 - i].memory.size()));
  });
}

TEST(no_more_than_the_window_is_buffered_and_the_sender_goes_on_when_it_is_used) {
  onEach([](LinkKind kind) {
    Sides sides(kind);
    constexpr std::uint32_t kMessages = 200;
    std::deque<Message> sent, got;
    // Something else keeps b reading.
    Message unmet(sides.b.ends, false, 1000, 1);
    sides.b.channel.receive(unmet.transfer);
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      sent.emplace_back(sides.a.ends, true, i, 10'000);
      sent.back().fillWith(i);
      sides.a.channel.send(sent.back().transfer);
      sides.settle();
      CHECK(sides.b.channel.unexpectedBytes() <= kEagerWindowBytes);
    }
    const std::size_t gone = sides.a.ends.order.size();
    CHECK_EQ(gone, kEagerWindowBytes / (10'000 + kFrameHeaderBytes));
    CHECK_EQ(sides.b.channel.unexpectedBytes(), gone * 10'000);
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      got.emplace_back(sides.b.ends, false, i, 10'000);
      sides.b.channel.receive(got.back().transfer);
    }
    sides.until([&] { return sides.a.ends.order.size() == kMessages && sides.b.ends.order.size() == kMessages; });
    for (std::uint32_t i = 0; i < kMessages; ++i) CHECK(got[i].isFilledWith(i, 10'000));
    CHECK_EQ(sides.b.channel.unexpectedBytes(), 0);
    // With its credit back, it sends at once again: nobody has to ask.
    Message late(sides.a.ends, true, 5000, 10'000);
    sides.a.channel.send(late.transfer);
    sides.settle();
    CHECK_EQ(sides.a.ends.order.size(), kMessages + 1);
  });
}

TEST(message_that_nobody_asks_for_blocks_no_other) {
  onEach([](LinkKind kind) {
    Sides sides(kind);
    Message ignored(sides.a.ends, true, 1, 3'000'000), sent(sides.a.ends, true, 2, 3'000'000);
    Message got(sides.b.ends, false, 2, 3'000'000);
    sent.transfer.index = 2;
    sides.a.channel.send(ignored.transfer);
    sides.a.channel.send(sent.transfer);
    sides.b.channel.receive(got.transfer);
    sides.until([&] { return sides.b.ends.order.size() == 1 && sides.a.ends.order.size() == 1; });
    CHECK_EQ(sides.a.ends.order[0], 2);
    CHECK(sides.a.channel.busy());
  });
}

TEST(message_of_another_size_is_a_mismatch) {
  onEach([](LinkKind kind) {
    for (const std::size_t bytes : {std::size_t{100}, std::size_t{100'000}}) {
      for (const int difference : {-1, 1}) {
        for (const bool asked_before : {true, false}) {
          Sides sides(kind);
          Message sent(sides.a.ends, true, 1, bytes + static_cast<std::size_t>(1 + difference));
          Message got(sides.b.ends, false, 1, bytes + 1), keeps_reading(sides.b.ends, false, 2, 1);
          got.transfer.exact = difference < 0;  // else: larger than its room
          const auto all = [&] {
            if (asked_before) sides.b.channel.receive(got.transfer);
            sides.b.channel.receive(keeps_reading.transfer);
            sides.a.channel.send(sent.transfer);
            sides.settle();
            if (!asked_before) sides.b.channel.receive(got.transfer);
            sides.until([&] { return sides.b.ends.order.size() == 1; });
          };
          CHECK_THROWS(all(), CollectiveMismatch);
          CHECK(sides.b.ends.order.empty());
        }
      }
    }
  });
}

TEST(receives_from_any_source_are_found_by_messages_and_find_them) {
  onEach([](LinkKind kind) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{500}, std::size_t{300'000}}) {
      Sides sides(kind);
      Message keeps_reading(sides.b.ends, false, 99, 1);
      sides.b.channel.receive(keeps_reading.transfer);
      Message first(sides.a.ends, true, 1, bytes), second(sides.a.ends, true, 1, bytes);
      Message got(sides.b.ends, false, 1, bytes), got_too(sides.b.ends, false, 1, bytes);
      got.transfer.index = 1;
      got_too.transfer.index = 2;
      first.fillWith(1);
      second.fillWith(2);
      CHECK(!sides.b.channel.tryReceive(got.transfer));
      sides.b.any.push_back(&got.transfer);
      sides.a.channel.send(first.transfer);
      sides.until([&] { return sides.b.ends.has(1); });
      sides.a.channel.send(second.transfer);
      sides.settle();
      CHECK(sides.b.channel.tryReceive(got_too.transfer));
      sides.until([&] { return sides.b.ends.has(2) && sides.a.ends.order.size() == 2; });
      CHECK(got.isFilledWith(1, bytes));
      CHECK(got_too.isFilledWith(2, bytes));
      CHECK_EQ(got.transfer.peer, 1);
    }
  });
}

TEST(frames_of_another_generation_are_never_parsed_further) {
  onEach([](LinkKind kind) {
    LinkPair pair(kind);
    Side a(pair.a.takeLink(), kGeneration), b(pair.b.takeLink(), kGeneration + 1);
    Message sent(a.ends, true, 1, 10), got(b.ends, false, 1, 10);
    b.channel.receive(got.transfer);
    a.channel.send(sent.transfer);
    const auto drive = [&] {
      const std::uint64_t deadline_ms = monotonicMs() + 10'000;
      while (b.ends.order.empty() && monotonicMs() < deadline_ms) b.channel.progress();
    };
    CHECK_THROWS(drive(), FrameError);
    CHECK(b.ends.order.empty());
  });
}

TEST(peer_that_closes_is_missed_only_by_those_who_need_it) {
  onEach([](LinkKind kind) {
    LinkPair pair(kind);
    Side b(pair.b.takeLink());
    Message got(b.ends, false, 1, 100), never(b.ends, false, 2, 100);
    {
      Side a(pair.a.takeLink());
      Message sent(a.ends, true, 1, 100);
      a.channel.send(sent.transfer);
    }
    b.channel.receive(got.transfer);
    const std::uint64_t deadline_ms = monotonicMs() + 10'000;
    while (b.ends.order.empty() && monotonicMs() < deadline_ms) b.channel.progress();
    CHECK_EQ(b.ends.order.size(), 1);
    for (int i = 0; i < 100; ++i) b.channel.progress();
    CHECK(!b.channel.busy());
    const auto drive = [&] {
      b.channel.receive(never.transfer);
      while (monotonicMs() < deadline_ms) b.channel.progress();
    };
    CHECK_THROWS(drive(), LinkClosed);
  });
}

// --- random schedules against a reference ---------------------------------------------------------------------------

struct RandomRun {
  RandomRun(LinkKind kind, std::uint32_t seed) : sides(kind), random(seed) {}

  // Per key, the i-th send meets the i-th receive, whatever happens in between.
  void run() {
    const std::uint32_t messages = 1 + random() % 60;
    const auto sizes = makeSizes(messages);
    std::uint32_t sent = 0, asked = 0;
    const std::uint64_t deadline_ms = monotonicMs() + 30'000;
    const auto done = [&] {
      return sent == messages && asked == messages && sides.a.ends.order.size() == messages &&
             sides.b.ends.order.size() == messages;
    };
    while (!done()) {
      CHECK(monotonicMs() < deadline_ms);
      switch (random() % 6) {
        case 0:
        case 1:
          if (sent < messages) post(sent++, true, sizes);
          break;
        case 2:
          if (asked < messages) post(asked++, false, sizes);
          break;
        case 3:
          sides.a.channel.progress();
          break;
        default:
          sides.b.channel.progress();
      }
    }
    check(messages, sizes);
  }

  std::vector<std::size_t> makeSizes(std::uint32_t messages) {
    std::vector<std::size_t> sizes;
    for (std::uint32_t i = 0; i < messages; ++i) {
      const std::size_t bounds[] = {200, kEagerBytesMax + 1, 40'000, 400'000};
      sizes.push_back(random() % 8 == 0 ? 0 : random() % bounds[random() % 4]);
      keys.push_back(random() % 4);
      order.push_back(i);
    }
    // The receiver asks in an order of its own among keys, but in order for each key.
    std::shuffle(order.begin(), order.end(), random);
    std::map<std::uint64_t, std::deque<std::uint32_t>> by_key;
    for (std::uint32_t i = 0; i < messages; ++i) by_key[keys[i]].push_back(i);
    for (auto& index : order) {
      auto& queue = by_key[keys[index]];
      index = queue.front();
      queue.pop_front();
    }
    gets.resize(messages);
    return sizes;
  }

  void post(std::uint32_t turn, bool is_send, const std::vector<std::size_t>& sizes) {
    const std::uint32_t i = is_send ? turn : order[turn];
    Side& side = is_send ? sides.a : sides.b;
    const std::size_t room = is_send ? sizes[i] : sizes[i] + random() % 10;
    auto message = std::make_unique<Message>(side.ends, is_send, keys[i], room);
    message->transfer.index = i;
    message->transfer.exact = false;
    Transfer& transfer = message->transfer;
    if (is_send) {
      message->fillWith(i);
      sends.push_back(std::move(message));
      side.channel.send(transfer);
    } else {
      gets[i] = std::move(message);
      side.channel.receive(transfer);
    }
  }

  void check(std::uint32_t messages, const std::vector<std::size_t>& sizes) {
    for (std::uint32_t i = 0; i < messages; ++i) {
      CHECK_EQ(gets[i]->transfer.bytes, sizes[i]);
      if (!gets[i]->isFilledWith(i, sizes[i])) fail(__FILE__, __LINE__, "message " + std::to_string(i) + " is wrong");
    }
    CHECK(!sides.a.channel.busy());
    CHECK_EQ(sides.b.channel.unexpectedBytes(), 0);
  }

  Sides sides;
  std::mt19937 random;
  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> order;
  std::vector<std::unique_ptr<Message>> sends, gets;
};

// Receives have room to spare, which a message need not fill.
TEST(two_hundred_random_schedules_deliver_what_was_sent) {
  for (std::uint32_t seed = 0; seed < 201; ++seed) {
    try {
      RandomRun(kLinkKinds[seed % 3], seed).run();
    } catch (const Failure& failure) {
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + failure.what);
    }
  }
}

}  // namespace
}  // namespace trainmover::check
