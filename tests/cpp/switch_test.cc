// A switch between runtimes of one process: what is prepared, swapped, refused, and what becomes of those who leave.
#include "switch_parties.h"

namespace trainmover {
namespace {

using namespace check;

const Groups kGroups = {{"world", {0, 1, 2}}, {"pair", {0, 2}}, {"others", {0, 1}}};
const Groups kSpread = {{"world", {0, 1, 2}}, {"again", {2, 1, 0}}};

void warm(SmallJob& job) {
  for (const auto& [name, ranks] : job.groups()) job.reduce(name, 1000, 3);
  job.pass("world", 100);
}

std::uint64_t held(Party& party) {
  const MemoryStats stats = party.runtime->memoryStats();
  return stats.shared_segments + stats.link_buffers + stats.unexpected_messages + stats.scratch;
}

LinkTally total(const std::vector<LinkTally>& tallies) {
  LinkTally all;
  for (const LinkTally& tally : tallies) {
    all.kept += tally.kept;
    all.replaced += tally.replaced;
    all.dropped += tally.dropped;
  }
  return all;
}

std::string textOf(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : " ") + std::to_string(rank);
  return text;
}

/// Rank 2 of three moves to `machine` and back, again and again. The others are linked to it in "world", which rank 0
/// also is in one more group.
void oneMoves(const std::vector<std::string>& machines, const std::string& machine, const Groups& groups,
              bool leaver_first) {
  SmallJob job(machines, groups);
  warm(job);
  Generation generation = 1;
  for (int round = 0; round < 8; ++round) {
    ++generation;
    const std::uint64_t before[2] = {held(job[0]), held(job[1])};
    auto joiner = job.joiner(2, round % 2 == 0 ? machine : machines[2], generation);
    const std::map<int, Endpoint> moved = {{2, joiner->runtime->endpoint()}};
    for (const int stayer : {0, 1}) job[stayer].runtime->prepareSwitch(generation, moved);
    for (int i = 0; i < 3; ++i) warm(job);
    for (const int stayer : {0, 1}) untilReady(job[stayer], generation);
    warm(job);

    CHECK_EQ(textOf(job[2].runtime->holdLinks(generation)), std::string("0 1"));
    const Handover handover = job[2].runtime->handover();
    if (leaver_first) job[2].runtime->leaveSwitch(generation);
    const LinkTally near = total(job[0].runtime->commitSwitch(generation));
    const LinkTally far = total(job[1].runtime->commitSwitch(generation));
    CHECK_EQ(near.replaced, 2u);
    CHECK_EQ(near.kept, groups.size() - 1);
    CHECK_EQ(far.replaced, groups.size() == 3 ? 1u : 2u);
    CHECK_EQ(near.dropped + far.dropped, 0u);
    if (machine != machines[1]) {  // else what was tcp is shm by now
      CHECK_EQ(held(job[0]), before[0]);
      CHECK_EQ(held(job[1]), before[1]);
    }
    if (!leaver_first) job[2].runtime->leaveSwitch(generation);
    joiner->runtime->goLive(generation, handover);
    auto leaver = job.put(joiner);
    warm(job);
    CHECK_THROWS(barrier(leaver->group("world")), SwitchError);
    if (round % 3 == 0) leaver->runtime->shutdown();
    warm(job);
    leaver->runtime->shutdown();
    warm(job);
    for (int rank = 0; rank < 3; ++rank) CHECK(!job[rank].runtime->aborted());
  }
}
TEST(a_rank_moves_over_tcp) { oneMoves({"", "", ""}, "", kGroups, true); }
TEST(a_rank_moves_over_tcp_and_its_leaver_is_the_last_to_know) { oneMoves({"", "", ""}, "", kGroups, false); }
TEST(a_rank_moves_between_machines) { oneMoves({"a", "b", "c"}, "d", kGroups, true); }
TEST(a_rank_moves_to_where_tcp_becomes_shm_and_back) { oneMoves({"a", "b", "c"}, "b", kSpread, false); }

TEST(a_move_that_would_put_a_group_on_one_machine_is_refused) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  auto joiner = job.joiner(2, "a", 2);
  CHECK_THROWS(job[0].runtime->prepareSwitch(2, {{2, joiner->runtime->endpoint()}}), SwitchError);
  joiner->runtime->shutdown();
}

TEST(ranks_that_share_memory_move_together_or_not_at_all) {
  SmallJob job({"a", "a", "c"}, kGroups);
  job.reduce("others", 10, 1);
  auto joiner = job.joiner(1, "d", 2);
  CHECK_THROWS(job[0].runtime->prepareSwitch(2, {{1, joiner->runtime->endpoint()}}), SwitchError);
  warm(job);
  joiner->runtime->shutdown();
}

TEST(what_is_not_its_turn_is_refused_and_changes_nothing) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  Runtime& stayer = *job[0].runtime;
  auto joiner = job.joiner(2, "d", 5);
  const std::map<int, Endpoint> moved = {{2, joiner->runtime->endpoint()}};
  CHECK_THROWS(stayer.commitSwitch(5), SwitchError);
  CHECK_THROWS(stayer.switchState(5), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(1, moved), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(5, {}), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(5, {{0, joiner->runtime->endpoint()}}), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(5, {{7, joiner->runtime->endpoint()}}), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(5, {{2, job[2].runtime->endpoint()}}), SwitchError);
  CHECK_THROWS(stayer.joinSwitch(5), SwitchError);
  CHECK_THROWS(stayer.goLive(5, {}), SwitchError);
  CHECK_THROWS(stayer.leaveSwitch(5), SwitchError);
  CHECK_THROWS(joiner->runtime->prepareSwitch(6, moved), SwitchError);
  CHECK_THROWS(joiner->runtime->setMode(Mode::kLive), SwitchError);
  CHECK_THROWS(joiner->runtime->goLive(6, {}), SwitchError);
  CHECK_THROWS(joiner->runtime->goLive(5, {1, {{"unknown", {}}}}), SwitchError);
  stayer.abortSwitch(5);
  stayer.prepareSwitch(5, moved);
  CHECK_THROWS(stayer.prepareSwitch(5, moved), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(6, moved), SwitchError);
  CHECK_THROWS(stayer.commitSwitch(6), SwitchError);
  CHECK_THROWS(stayer.holdLinks(6), SwitchError);
  stayer.abortSwitch(6);
  untilReady(job[0], 5);
  stayer.abortSwitch(5);
  stayer.abortSwitch(5);
  CHECK_THROWS(stayer.commitSwitch(5), SwitchError);
  CHECK_THROWS(stayer.prepareSwitch(5, moved), SwitchError);
  warm(job);
  joiner->runtime->shutdown();
}

TEST(a_commit_with_something_outstanding_to_the_rank_that_moves_is_refused) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  auto joiner = job.joiner(2, "d", 2);
  job[0].runtime->prepareSwitch(2, {{2, joiner->runtime->endpoint()}});
  untilReady(job[0], 2);
  std::vector<float> values(10), sent(10);
  auto receive = job[0].group("pair").receive(bufferOf(values), 1, 4, kCallLimit);
  CHECK_THROWS(job[0].runtime->commitSwitch(2), SwitchError);
  auto send = job[2].group("pair").send(bufferOf(sent), 0, 4, kCallLimit);
  receive->wait();
  send->wait();
  std::vector<std::int32_t> one(10);
  auto reduce = start(job[0].group("world"), CollectiveKind::kAllReduce, {}, {bufferOf(one)}, 0, DataType::kInt32);
  CHECK_THROWS(job[0].runtime->commitSwitch(2), SwitchError);
  CHECK_THROWS(job[0].runtime->holdLinks(3), SwitchError);
  std::vector<std::int32_t> two(10), three(10);
  auto second = start(job[1].group("world"), CollectiveKind::kAllReduce, {}, {bufferOf(two)}, 0, DataType::kInt32);
  auto third = start(job[2].group("world"), CollectiveKind::kAllReduce, {}, {bufferOf(three)}, 0, DataType::kInt32);
  for (const auto& operation : {reduce, second, third}) operation->wait();
  // Between ranks that stay, operations may be outstanding.
  auto elsewhere = job[0].group("others").receive(bufferOf(values), 1, 4, kCallLimit);
  CHECK_EQ(total(job[0].runtime->commitSwitch(2)).replaced, 2u);
  job[1].group("others").send(bufferOf(sent), 0, 4, kCallLimit)->wait();
  elsewhere->wait();
  joiner->runtime->shutdown();
}

TEST(a_joiner_that_ends_breaks_what_is_prepared_and_the_next_one_does) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  for (Generation generation = 2; generation < 22; generation += 2) {
    auto first = job.joiner(2, "d", generation);
    job[0].runtime->prepareSwitch(generation, {{2, first->runtime->endpoint()}});
    if (generation % 4 == 0) untilReady(job[0], generation);
    first->runtime->shutdown();
    const std::string why = untilBroken(job[0], generation);
    CHECK(why.find("global rank 2") != std::string::npos);
    warm(job);
    job[0].runtime->abortSwitch(generation);
    auto second = job.joiner(2, "d", generation + 1);
    job[0].runtime->prepareSwitch(generation + 1, {{2, second->runtime->endpoint()}});
    untilReady(job[0], generation + 1);
    job[0].runtime->abortSwitch(generation + 1);
    // The same process, for the next switch.
    warm(job);
    second->runtime->shutdown();
  }
}

TEST(one_prepared_link_that_is_closed_withdraws_readiness_and_connects_at_first_use) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  auto joiner = job.joiner(2, "d", 2);
  for (const int stayer : {0, 1}) job[stayer].runtime->prepareSwitch(2, {{2, joiner->runtime->endpoint()}});
  for (const int stayer : {0, 1}) untilReady(job[stayer], 2);
  joiner->group("pair").close();
  CHECK(untilBroken(job[0], 2).find("group pair to global rank 2 was closed") != std::string::npos);
  untilReady(job[1], 2);
  // After the verdict it has to be committed all the same.
  job[2].runtime->holdLinks(2);
  const LinkTally near = total(job[0].runtime->commitSwitch(2));
  CHECK_EQ(near.replaced, 1u);
  CHECK_EQ(near.dropped, 1u);
  job[2].runtime->abortSwitch(2);
  joiner->runtime->shutdown();
}

TEST(one_joiner_may_be_prepared_for_again_and_again) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  auto joiner = job.joiner(2, "d", 2);
  for (Generation generation = 2; generation < 60; ++generation) {
    if (generation > 2) joiner->runtime->joinSwitch(generation);
    for (const int stayer : {0, 1}) job[stayer].runtime->prepareSwitch(generation, {{2, joiner->runtime->endpoint()}});
    if (generation % 3 != 0) untilReady(job[0], generation);
    if (generation % 5 != 0) untilReady(job[1], generation);
    warm(job);
    for (const int stayer : {0, 1}) job[stayer].runtime->abortSwitch(generation);
    if (generation % 2 != 0) joiner->runtime->abortSwitch(generation);
  }
  CHECK_THROWS(joiner->runtime->goLive(59, job[2].runtime->handover()), SwitchError);  // it was aborted
  joiner->runtime->joinSwitch(60);
  const auto ready = [&] { return joiner->runtime->switchState(60).phase == SwitchPhase::kReady; };
  eventually(ready, "what was said of connections before is forgotten");
  joiner->runtime->shutdown();
}

TEST(aborting_collectives_voids_what_is_prepared_and_a_later_generation_works) {
  SmallJob job({"a", "b", "c"}, kGroups);
  warm(job);
  auto joiner = job.joiner(2, "d", 2);
  job[0].runtime->prepareSwitch(2, {{2, joiner->runtime->endpoint()}});
  untilReady(job[0], 2);
  job[0].runtime->abortCollectives(-1, "a test");
  CHECK(untilBroken(job[0], 2).find("a test") != std::string::npos);
  CHECK_THROWS(job[0].runtime->commitSwitch(2), SwitchError);
  for (int rank = 0; rank < 3; ++rank) {
    eventually([&] { return job[rank].runtime->aborted(); }, "the abort is heard");
  }
  CHECK_THROWS(job[0].runtime->resume(2), SwitchError);
  for (int rank = 0; rank < 3; ++rank) job[rank].runtime->resume(3);
  warm(job);
  joiner->runtime->joinSwitch(4);
  for (const int stayer : {0, 1}) job[stayer].runtime->prepareSwitch(4, {{2, joiner->runtime->endpoint()}});
  for (const int stayer : {0, 1}) untilReady(job[stayer], 4);
  job[2].runtime->holdLinks(4);
  const Handover handover = job[2].runtime->handover();
  CHECK_EQ(handover.recovery, 3u);
  for (const int stayer : {0, 1}) job[stayer].runtime->commitSwitch(4);
  job[2].runtime->leaveSwitch(4);
  joiner->runtime->goLive(4, handover);
  auto leaver = job.put(joiner);
  warm(job);
  // An abort reaches the joiner as any other rank, and it resumes with them.
  job[1].runtime->abortCollectives(-1, "another");
  for (int rank = 0; rank < 3; ++rank) eventually([&] { return job[rank].runtime->aborted(); }, "the abort is heard");
  CHECK(!leaver->runtime->aborted());
  for (int rank = 0; rank < 3; ++rank) job[rank].runtime->resume(5);
  warm(job);
  leaver->runtime->shutdown();
}

TEST(a_rank_that_stays_after_all_lets_callers_in_again) {
  SmallJob job({"a", "b", "c"}, kGroups);
  job.reduce("others", 10, 1);
  CHECK(job[2].runtime->holdLinks(2).empty());
  std::vector<std::int32_t> values(10, 1);
  auto waits = job[0].group("pair").send(bufferOf(values), 1, 4, kCallLimit);
  ::poll(nullptr, 0, 100);  // there is nothing to see of a caller that waits at the door
  CHECK(job[2].runtime->linkedRanks().empty());
  job[2].runtime->abortSwitch(2);
  std::vector<std::int32_t> got(10);
  job[2].group("pair").receive(bufferOf(got), 0, 4, kCallLimit)->wait();
  waits->wait();
  CHECK_EQ(got, values);
  warm(job);
}

TEST(callers_of_a_rank_that_moved_find_it_when_they_are_told) {
  for (int round = 0; round < 10; ++round) {
    SmallJob job({"a", "b", "c"}, kGroups);
    job.reduce("others", 10, 1);
    auto joiner = job.joiner(2, "d", 2);
    job[2].runtime->holdLinks(2);
    std::vector<std::int32_t> values(10, 7);
    std::shared_ptr<Operation> send;
    const auto dial = [&] { send = job[0].group("pair").send(bufferOf(values), 1, 4, kCallLimit); };
    if (round % 3 == 0) dial();
    const Handover handover = job[2].runtime->handover();
    job[2].runtime->leaveSwitch(2);
    if (round % 3 == 1) dial();
    joiner->runtime->goLive(2, handover);
    auto leaver = job.put(joiner);
    if (round % 2 == 0) leaver->runtime->shutdown();
    if (round % 3 == 2) dial();
    std::vector<std::int32_t> got(10);
    auto receive = job[2].group("pair").receive(bufferOf(got), 0, 4, kCallLimit);
    ::poll(nullptr, 0, round * 20);
    CHECK(!receive->finished());
    job[0].runtime->addEndpoints({{2, job[2].runtime->endpoint()}}, 2);
    receive->wait();
    send->wait();
    CHECK_EQ(got, values);
    job[1].runtime->addEndpoints({{2, job[2].runtime->endpoint()}}, 2);
    job[1].runtime->addEndpoints({{2, leaver->runtime->endpoint()}}, 1);  // older news
    warm(job);
    leaver->runtime->shutdown();
  }
}

TEST(a_call_that_a_leaver_holds_waits_for_longer_than_a_connection_may_take) {
  SmallJob job({"a", "b", "c"}, kGroups, 1000);
  job.reduce("others", 10, 1);
  job[2].runtime->holdLinks(2);
  std::vector<std::int32_t> values(10, 7), got(10);
  auto send = job[0].group("pair").send(bufferOf(values), 1, 4, kCallLimit);
  ::poll(nullptr, 0, 2500);
  if (send->finished()) send->wait();
  CHECK(!send->finished() && !job[0].runtime->aborted());
  job[2].runtime->abortSwitch(2);
  job[2].group("pair").receive(bufferOf(got), 0, 4, kCallLimit)->wait();
  send->wait();
  CHECK_EQ(got, values);
  warm(job);
}

// The note asks for a channel to the leaver, which has said farewell; the commit brings the joiner's.
TEST(a_note_between_the_leavers_farewell_and_the_commit_goes_to_nobody_and_harms_nobody) {
  SmallJob job({"a", "b", "c"}, kGroups, 1000);
  warm(job);
  auto joiner = job.joiner(2, "d", 2);
  for (const int stayer : {0, 1}) job[stayer].runtime->prepareSwitch(2, {{2, joiner->runtime->endpoint()}});
  for (const int stayer : {0, 1}) untilReady(job[stayer], 2);
  job[2].runtime->holdLinks(2);
  const Handover handover = job[2].runtime->handover();
  job[2].runtime->leaveSwitch(2);
  ::poll(nullptr, 0, 100);  // until the farewell is there
  job[0].runtime->sendNote(2, 2, "to the leaver");
  ::poll(nullptr, 0, 50);
  for (const int stayer : {0, 1}) job[stayer].runtime->commitSwitch(2);
  job[0].runtime->sendNote(2, 2, "to the joiner");
  joiner->runtime->goLive(2, handover);
  auto leaver = job.put(joiner);
  const auto note = job[2].runtime->receiveNote(std::chrono::seconds{10});
  CHECK(note && note->payload == "to the joiner");
  CHECK(!job[2].runtime->receiveNote(std::chrono::milliseconds{100}));
  ::poll(nullptr, 0, 2000);
  warm(job);
  for (int rank = 0; rank < 3; ++rank) CHECK(!job[rank].runtime->aborted());
  leaver->runtime->shutdown();
}

TEST(a_joiner_that_calls_those_who_have_not_heard_waits_for_them) {
  SmallJob job({"a", "b", "c"}, kGroups);
  job.reduce("others", 10, 1);
  auto joiner = job.joiner(2, "d", 2);
  job[2].runtime->holdLinks(2);
  const Handover handover = job[2].runtime->handover();
  job[2].runtime->leaveSwitch(2);
  joiner->runtime->goLive(2, handover);
  auto leaver = job.put(joiner);
  std::vector<std::int32_t> values(10, 7), got(10);
  auto send = job[2].group("pair").send(bufferOf(values), 0, 4, kCallLimit);
  ::poll(nullptr, 0, 100);
  CHECK(!send->finished());
  job[0].runtime->addEndpoints({{2, job[2].runtime->endpoint()}}, 2);
  job[0].group("pair").receive(bufferOf(got), 1, 4, kCallLimit)->wait();
  send->wait();
  CHECK_EQ(got, values);
  leaver->runtime->shutdown();
}

}  // namespace
}  // namespace trainmover
