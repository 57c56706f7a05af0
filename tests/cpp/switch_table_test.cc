// The pure tables of a switch: who holds a slot since when, what a plan waits for, notes that wait to be taken.
#include <thread>

#include "check.h"
#include "runtime/directory.h"
#include "runtime/notes.h"
#include "runtime/switch_plan.h"

namespace trainmover {
namespace {

Endpoint process(std::uint64_t incarnation) {
  Endpoint endpoint;
  endpoint.incarnation = incarnation;
  return endpoint;
}

TEST(later_changes_of_hands_win_and_older_news_is_left_aside) {
  Directory directory(0);
  CHECK(directory.add({{0, process(1)}, {1, process(2)}}, 1).empty());
  CHECK_EQ(directory.add({{1, process(3)}}, 5).size(), 1u);
  CHECK(directory.add({{1, process(2)}}, 4).empty());
  CHECK(directory.add({{1, process(2)}}, 1).empty());
  CHECK_EQ(directory.find(1)->incarnation, 3u);
  // Within one generation the last word counts, as at the start of a job.
  CHECK_EQ(directory.add({{1, process(4)}}, 5).at(0), 1);
  CHECK_EQ(directory.find(1)->incarnation, 4u);
  CHECK(directory.add({{1, process(4)}}, 6).empty());
  CHECK_EQ(directory.newest(), 6u);
  CHECK(!directory.find(2));
}

TEST(nobody_else_can_be_put_into_the_own_slot) {
  Directory directory(0);
  directory.add({{0, process(1)}}, 1);
  CHECK(directory.add({{0, process(9)}}, 7).empty());
  CHECK_EQ(directory.find(0)->incarnation, 1u);
  CHECK_EQ(directory.pairGeneration(1, 1), 1u);
  directory.add({{0, process(1)}}, 3);
  CHECK_EQ(directory.pairGeneration(1, 1), 3u);
}

TEST(a_pair_bears_the_latest_of_both_slots_and_the_recovery) {
  Directory directory(0);
  directory.add({{0, process(1)}, {1, process(2)}, {2, process(3)}}, 1);
  directory.add({{1, process(5)}}, 4);
  CHECK_EQ(directory.pairGeneration(1, 1), 4u);
  CHECK_EQ(directory.pairGeneration(2, 1), 1u);
  CHECK_EQ(directory.pairGeneration(2, 3), 3u);
  CHECK_EQ(directory.pairGeneration(1, 6), 6u);
  CHECK_EQ(directory.pairGeneration(9, 2), 2u);
  directory.add({{0, process(1)}}, 8);
  CHECK_EQ(directory.pairGeneration(1, 6), 8u);
}

TEST(a_plan_is_ready_when_every_link_and_channel_is_up) {
  SwitchPlan plan(3, {{4, process(1)}, {5, process(2)}}, {{10, 4}, {11, 4}, {10, 5}});
  CHECK(plan.moves(4) && plan.moves(5) && !plan.moves(6));
  CHECK_EQ(plan.missingChannels().size(), 2u);
  plan.channelUp(4);
  plan.linkUp({10, 4});
  plan.linkUp({11, 4});
  plan.linkUp({99, 4});  // not of the plan: nothing to it
  plan.channelUp(5);
  CHECK_EQ(plan.state().phase, SwitchPhase::kPending);
  CHECK_EQ(plan.missingLinks().size(), 1u);
  plan.linkUp({10, 5});
  CHECK_EQ(plan.state().phase, SwitchPhase::kReady);
  plan.linkUp({10, 5});
  CHECK_EQ(plan.state().phase, SwitchPhase::kReady);
}

TEST(a_plan_that_breaks_stays_broken_for_its_first_reason) {
  for (const bool ready : {false, true}) {
    SwitchPlan plan(3, {{4, process(1)}}, {{10, 4}});
    if (ready) {
      plan.channelUp(4);
      plan.linkUp({10, 4});
    }
    plan.broke("first");
    plan.broke("second");
    plan.channelUp(4);
    plan.linkUp({10, 4});
    CHECK_EQ(plan.state().phase, SwitchPhase::kBroken);
    CHECK_EQ(plan.state().reason, std::string("first"));
  }
}

TEST(a_plan_without_links_is_ready_at_once) {
  CHECK_EQ(SwitchPlan(3, {{4, process(1)}}, {}).state().phase, SwitchPhase::kReady);
}

TEST(notes_are_taken_in_order_up_to_a_bound) {
  NoteBox box;
  for (std::size_t i = 0; i < kNotesReceivedMax; ++i) CHECK(box.put({1, i, "x"}));
  CHECK(!box.put({1, 0, "too many"}));
  for (std::size_t i = 0; i < kNotesReceivedMax; ++i) {
    CHECK_EQ(box.take(std::chrono::milliseconds{0})->generation, i);
  }
  CHECK(!box.take(std::chrono::milliseconds{1}));
}

TEST(whoever_waits_for_a_note_wakes_when_one_comes_or_the_box_is_closed) {
  NoteBox box;
  const auto start = std::chrono::steady_clock::now();
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds{50}); };  // until somebody waits
  std::thread giver([&] {
    pause();
    box.put({2, 7, "late"});
  });
  const auto note = box.take(std::chrono::seconds{60});
  giver.join();
  CHECK(note && note->peer == 2 && note->payload == "late");
  std::thread closer([&] {
    pause();
    box.close();
  });
  CHECK(!box.take(std::chrono::seconds{60}));
  closer.join();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds{20});
}

}  // namespace
}  // namespace trainmover
