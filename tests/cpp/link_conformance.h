// What every transport's link must do, whatever it is made of: one suite, run on each by link_test.cc. Each function is
// one claim; registerLinkConformance() makes a test of each for one kind of link.
#pragma once

#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "job.h"
#include "link_ends.h"

namespace trainmover::check {

/// Writes until the link takes nothing, twice in a row; returns the bytes taken.
inline std::uint64_t fillUp(LinkEnd& from, StreamWriter& writer) {
  const std::uint64_t start = writer.written();
  for (int refused = 0; refused < 2;) {
    refused = writer.once() == 0 ? refused + 1 : 0;
    from.link().notify();
    if (writer.done()) fail(__FILE__, __LINE__, "the link is never full");
  }
  return writer.written() - start;
}

/// Reads the rest of a stream; a kernel may need a moment to carry it over.
inline void readRest(LinkEnd& end, StreamReader& reader) {
  end.untilTrue([&] {
    while (reader.once() > 0) {
    }
    end.link().notify();
    return reader.done();
  });
}

/// Reads until the link says that it is closed; nothing may come before that.
inline bool endsHere(LinkEnd& end) {
  bool closed = false;
  end.untilTrue([&] {
    try {
      unsigned char byte = 0;
      if (end.link().read(&byte, 1) > 0) fail(__FILE__, __LINE__, "a byte came that nobody wrote");
    } catch (const LinkClosed&) {
      closed = true;
    }
    return closed;
  });
  return closed;
}

namespace conformance {

constexpr std::uint64_t kMuch = std::uint64_t{1} << 40;

inline void bytesArriveInOrderBothWaysInAnyChunks(LinkKind kind) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    LinkPair pair(kind);
    constexpr std::uint64_t kTotal = 1'500'000;
    StreamWriter there(pair.a.link(), kTotal, 1, seed), back(pair.b.link(), kTotal, 2, seed + 10);
    StreamReader from_a(pair.b.link(), kTotal, 1, seed + 20), from_b(pair.a.link(), kTotal, 2, seed + 30);
    std::mt19937 random(seed);
    const std::uint64_t deadline_ms = monotonicMs() + 30'000;
    while (!from_a.done() || !from_b.done()) {
      CHECK(monotonicMs() < deadline_ms);
      // Tiny chunks now and then, so that headers are cut at every byte.
      const std::size_t chunk = random() % 3 == 0 ? 40 : 70'000;
      switch (random() % 4) {
        case 0:
          there.once(chunk);
          break;
        case 1:
          back.once(chunk);
          break;
        case 2:
          from_a.once(chunk);
          break;
        default:
          from_b.once(chunk);
      }
    }
  }
}

inline void fullLinkTakesNothingAndGoesOnAfterReads(LinkKind kind) {
  LinkPair pair(kind);
  StreamWriter writer(pair.a.link(), kMuch, 1, 1);
  const std::uint64_t room = fillUp(pair.a, writer);
  CHECK(room >= 64 * 1024);
  StreamReader reader(pair.b.link(), room, 1, 2);
  readRest(pair.b, reader);
  pair.b.link().notify();
  pair.a.untilTrue([&] { return writer.once() > 0; });
  CHECK(fillUp(pair.a, writer) > 0);
}

inline void writingNothingChangesNothing(LinkKind kind) {
  LinkPair pair(kind);
  const IoSlice parts[2] = {{nullptr, 0}, {"", 0}};
  CHECK_EQ(pair.a.link().write(parts, 2), 0);
  CHECK_EQ(pair.a.link().write(parts, 0), 0);
  unsigned char byte = 0;
  CHECK_EQ(pair.b.link().read(&byte, 1), 0);
  StreamWriter writer(pair.a.link(), 100, 1, 1);
  StreamReader reader(pair.b.link(), 100, 1, 1);
  while (!writer.done()) writer.once();
  pair.a.link().notify();
  readRest(pair.b, reader);
}

inline void closingDeliversWhatWasWrittenBefore(LinkKind kind) {
  for (const bool full : {false, true}) {
    LinkPair pair(kind);
    StreamWriter writer(pair.a.link(), full ? kMuch : 10'000, 1, 1);
    if (full) {
      fillUp(pair.a, writer);
    } else {
      while (!writer.done()) writer.once();
    }
    pair.a.link().notify();
    const std::uint64_t written = writer.written();
    pair.a.close();
    StreamReader reader(pair.b.link(), written, 1, 2);
    readRest(pair.b, reader);
    CHECK(endsHere(pair.b));
    CHECK(endsHere(pair.b));  // and stays so
  }
}

// The end that closes has not read what the other wrote, and the other writes on.
inline void closingDeliversWhatWasWrittenBeforeThoughMuchIsUnread(LinkKind kind) {
  LinkPair pair(kind);
  StreamWriter unread(pair.b.link(), kMuch, 2, 3);
  fillUp(pair.b, unread);
  StreamWriter writer(pair.a.link(), 5000, 1, 1);
  while (!writer.done()) writer.once();
  pair.a.link().notify();
  pair.a.close();
  StreamReader reader(pair.b.link(), 5000, 1, 2);
  readRest(pair.b, reader);
  CHECK(endsHere(pair.b));
}

inline void writingToAClosedPeerThrows(LinkKind kind) {
  LinkPair pair(kind);
  pair.b.close();
  bool threw = false;
  const std::uint64_t deadline_ms = monotonicMs() + 10'000;
  StreamWriter writer(pair.a.link(), kMuch, 1, 1);
  while (!threw && monotonicMs() < deadline_ms) {
    try {
      writer.once();
    } catch (const LinkClosed&) {
      threw = true;
    }
  }
  CHECK(threw);
}

inline void remoteMemoryIsReadWhileThePeerIsThere(LinkKind kind) {
  LinkPair pair(kind);
  CHECK_EQ(pair.b.link().canReadRemote(), kind == LinkKind::kShm);
  if (kind != LinkKind::kShm) return;
  std::vector<std::uint64_t> memory(1'000'000), copy(1'000'000);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = i * i;
  const auto address = reinterpret_cast<std::uint64_t>(memory.data());
  pair.b.link().readRemote(address, copy.data(), memory.size() * 8);
  CHECK(copy == memory);
  std::uint64_t one = 0;
  pair.b.link().readRemote(address + 80, &one, 8);
  CHECK_EQ(one, 100);
  pair.b.link().readRemote(address, &one, 0);
  CHECK_THROWS(pair.b.link().readRemote(16, &one, 8), LinkClosed);  // nothing lies there
  pair.a.close();
  // The memory is still there, but may be anything by now.
  CHECK_THROWS(pair.b.link().readRemote(address, &one, 8), LinkClosed);
}

inline void linkTellsWhatItIs(LinkKind kind) {
  LinkPair pair(kind);
  for (LinkEnd* end : {&pair.a, &pair.b}) {
    end->link().activate();
    end->link().activate();
    CHECK_EQ(std::string(end->link().transport()), std::string(kind == LinkKind::kTcp ? "tcp" : "shm"));
    CHECK_EQ(end->link().descriptor() >= 0, kind == LinkKind::kTcp);
    CHECK_EQ(end->link().heldBytes(), kind == LinkKind::kTcp ? std::size_t{32} << 10 : shm::segmentBytes());
  }
}

inline void linkThatIsNotLiveYetHoldsNoBufferOfItsOwn(LinkKind kind) {
  LinkPair pair(kind);
  CHECK_EQ(pair.a.link().heldBytes(), kind == LinkKind::kTcp ? 0 : shm::segmentBytes());
}

inline void closedPeerIsSeenWithoutReading(LinkKind kind) {
  for (const bool unread : {false, true}) {
    LinkPair pair(kind);
    CHECK(!pair.a.link().isClosed());
    CHECK(!pair.b.link().isClosed());
    StreamWriter writer(pair.a.link(), 100, 1, 1);
    if (unread) {
      while (!writer.done()) writer.once();
    }
    CHECK(!pair.b.link().isClosed());
    pair.a.close();
    pair.b.untilTrue([&] { return pair.b.link().isClosed(); });
    StreamReader reader(pair.b.link(), unread ? 100 : 0, 1, 1);
    readRest(pair.b, reader);
    CHECK(endsHere(pair.b));
    CHECK(pair.b.link().isClosed());
  }
}

/// Moves `out` bytes from this end and `in` to it at once; the other end is in another thread or process. Every wait is
/// a sleep that only the other end's wake-up may end.
inline void exchangeStreams(LinkEnd& end, std::uint64_t out, std::uint64_t in, unsigned mine, std::size_t chunk_max) {
  StreamWriter writer(end.link(), out, mine, mine);
  StreamReader reader(end.link(), in, 3 - mine, mine + 10);
  end.untilTrue([&] {
    // As much as can be, as the engine does: an edge-triggered descriptor tells of no change that was not seen.
    bool moved = true;
    while (moved) {
      moved = writer.once(chunk_max) > 0;
      moved |= reader.once(chunk_max) > 0;
      end.link().notify();
    }
    return writer.done() && reader.done();
  });
}

/// Runs both at once; ends the test when either fails.
template <typename One, typename Other>
void inTwoThreads(One one, Other other) {
  const auto caught = [](const auto& body) -> std::string {
    try {
      body();
      return "";
    } catch (const Failure& failure) {
      return failure.what;
    } catch (const std::exception& error) {
      return error.what();
    }
  };
  std::string why;
  std::thread thread([&] { why = caught(other); });
  const std::string own_why = caught(one);
  thread.join();
  CHECK_EQ(own_why + why, std::string());
}

inline void betweenThreads(LinkKind kind, std::uint64_t there, std::uint64_t back, std::size_t chunk_max) {
  LinkPair pair(kind);
  inTwoThreads([&] { exchangeStreams(pair.a, there, back, 1, chunk_max); },
               [&] { exchangeStreams(pair.b, back, there, 2, chunk_max); });
}

// One way, too: then nothing but room for it wakes the writer.
inline void noWakeUpIsLostBetweenThreads(LinkKind kind) {
  betweenThreads(kind, 2'000'000, 2'000'000, 300);
  betweenThreads(kind, 20'000'000, 0, 50'000);
  betweenThreads(kind, 0, 20'000'000, 50'000);
}
inline void largeVolumesGoBothWaysAtOnce(LinkKind kind) { betweenThreads(kind, 64 << 20, 64 << 20, 300'000); }

inline void oneMessageAtATimeWakesTheOther(LinkKind kind) {
  LinkPair pair(kind);
  constexpr int kRounds = 3000;
  const auto play = [](LinkEnd& end, bool first) {
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      for (const bool speaks : {first, !first}) {
        std::uint32_t number = round;
        const IoSlice part{&number, sizeof number};
        if (speaks) {
          CHECK_EQ(end.link().write(&part, 1), sizeof number);
          end.link().notify();
        } else {
          end.untilTrue([&] { return end.link().read(&number, sizeof number) == sizeof number; });
          CHECK_EQ(number, round);
        }
      }
    }
  };
  inTwoThreads([&] { play(pair.a, true); }, [&] { play(pair.b, false); });
}

inline void worksBetweenProcesses(LinkKind kind) {
  TalkingPair talk;
  runJob(2, [kind, talk](Member& member) {
    const bool creator = member.rank() == 0;
    ::close(talk.fds[creator ? 1 : 0]);
    LinkEnd end(kind, creator, talk.fds[creator ? 0 : 1]);
    end.connect();
    exchangeStreams(end, 3'000'000, 3'000'000, creator ? 1 : 2, 5000);
    const std::vector<unsigned char> memory(300'000, static_cast<unsigned char>(member.rank() + 1));
    const auto addresses = member.exchange(std::to_string(reinterpret_cast<std::uint64_t>(memory.data())));
    if (end.link().canReadRemote()) {
      std::vector<unsigned char> copy(memory.size());
      end.link().readRemote(std::stoull(addresses[creator ? 1 : 0]), copy.data(), copy.size());
      for (const auto byte : copy) CHECK_EQ(byte, creator ? 2 : 1);
    }
    member.meet();
    if (creator) end.close();
    if (!creator) CHECK(endsHere(end));
  });
  for (const int fd : talk.fds) ::close(fd);
}

inline void memoryOfADeadProcessIsNotRead(LinkKind kind) {
  if (kind != LinkKind::kShm) return;
  TalkingPair talk;
  runJob(
      2,
      [kind, talk](Member& member) {
        const bool creator = member.rank() == 0;
        LinkEnd end(kind, creator, talk.fds[creator ? 0 : 1]);
        end.connect();
        const std::vector<std::uint64_t> memory(1000, 5);
        const auto texts = member.exchange(std::to_string(reinterpret_cast<std::uint64_t>(memory.data())));
        if (member.rank() == 1) ::kill(::getpid(), SIGKILL);
        member.meet();
        std::uint64_t word = 0;
        CHECK_THROWS(end.link().readRemote(std::stoull(texts[1]), &word, sizeof word), LinkClosed);
      },
      1);
  for (const int fd : talk.fds) ::close(fd);
}

}  // namespace conformance

/// Makes a test of every claim, for `kind`.
inline bool registerLinkConformance(LinkKind kind) {
  using namespace conformance;
  const std::pair<const char*, void (*)(LinkKind)> claims[] = {
      {"bytes_arrive_in_order_both_ways_in_any_chunks", bytesArriveInOrderBothWaysInAnyChunks},
      {"full_link_takes_nothing_and_goes_on_after_reads", fullLinkTakesNothingAndGoesOnAfterReads},
      {"writing_nothing_changes_nothing", writingNothingChangesNothing},
      {"closing_delivers_what_was_written_before", closingDeliversWhatWasWrittenBefore},
      {"closing_delivers_what_was_written_before_though_much_is_unread",
       closingDeliversWhatWasWrittenBeforeThoughMuchIsUnread},
      {"writing_to_a_closed_peer_throws", writingToAClosedPeerThrows},
      {"remote_memory_is_read_while_the_peer_is_there", remoteMemoryIsReadWhileThePeerIsThere},
      {"link_tells_what_it_is", linkTellsWhatItIs},
      {"link_that_is_not_live_yet_holds_no_buffer_of_its_own", linkThatIsNotLiveYetHoldsNoBufferOfItsOwn},
      {"closed_peer_is_seen_without_reading", closedPeerIsSeenWithoutReading},
      {"no_wake_up_is_lost_between_threads", noWakeUpIsLostBetweenThreads},
      {"one_message_at_a_time_wakes_the_other", oneMessageAtATimeWakesTheOther},
      {"large_volumes_go_both_ways_at_once", largeVolumesGoBothWaysAtOnce},
      {"link_works_between_processes", worksBetweenProcesses},
      {"memory_of_a_dead_process_is_not_read", memoryOfADeadProcessIsNotRead},
  };
  for (const auto& [name, claim] : claims) {
    testCases().push_back({nameOf(kind) + "_" + name, [claim = claim, kind] { claim(kind); }});
  }
  return true;
}

}  // namespace trainmover::check
