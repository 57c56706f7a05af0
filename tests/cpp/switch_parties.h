// Several ranks of a job as runtimes of one process, some of which take over others' ranks: what the tests of a switch
// begin with. Each has its own threads, listeners and links; only the process is shared.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime_calls.h"

namespace trainmover::check {

using Groups = std::vector<std::pair<std::string, std::vector<int>>>;

/// One process of the job, as far as the data plane goes.
struct Party {
  int rank = 0;
  std::shared_ptr<Runtime> runtime;
  std::map<std::string, std::shared_ptr<Communicator>> groups;

  Communicator& group(const std::string& name) { return *groups.at(name); }
};

inline Settings settingsOf(const std::string& machine_id, std::uint64_t connect_timeout_ms = 20'000) {
  Settings settings;
  settings.machine_id = machine_id;
  settings.use_shared_memory = !machine_id.empty();
  settings.local_ranks = 64;
  settings.flight_recorder_entries = 16;
  settings.connect_timeout_ms = connect_timeout_ms;
  return settings;
}

inline std::shared_ptr<Party> makeParty(int rank, const Settings& settings, Mode mode, const Groups& groups,
                                        const std::string& token = "secret") {
  auto party = std::make_shared<Party>();
  party->rank = rank;
  party->runtime = Runtime::create(rank, {"test", token, "constants"}, settings, mode);
  for (const auto& [name, ranks] : groups) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    party->groups[name] = party->runtime->createCommunicator(name, ranks, kCallLimit);
  }
  return party;
}

/// A job of one rank a machine; an empty machine id: tcp only.
class SmallJob {
 public:
  SmallJob(const std::vector<std::string>& machines, Groups groups, std::uint64_t connect_timeout_ms = 20'000)
      : groups_(std::move(groups)) {
    for (std::size_t rank = 0; rank < machines.size(); ++rank) {
      const Settings settings = settingsOf(machines[rank], connect_timeout_ms);
      members_.push_back(makeParty(static_cast<int>(rank), settings, Mode::kLive, groups_));
    }
    for (const auto& member : members_) member->runtime->addEndpoints(endpoints());
  }
  ~SmallJob() {
    for (const auto& member : members_) member->runtime->shutdown();
  }

  Party& operator[](int rank) { return *members_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(members_.size()); }
  const Groups& groups() const { return groups_; }
  std::map<int, Endpoint> endpoints() const {
    std::map<int, Endpoint> all;
    for (const auto& member : members_) all[member->rank] = member->runtime->endpoint();
    return all;
  }

  /// A process that is to take `rank` in `generation`.
  std::shared_ptr<Party> joiner(int rank, const std::string& machine, Generation generation,
                                const std::string& token = "secret") {
    auto made = makeParty(rank, settingsOf(machine), Mode::kIsolated, groups_, token);
    made->runtime->addEndpoints(endpoints());
    made->runtime->joinSwitch(generation);
    return made;
  }

  /// From now on `party` is its rank; returns who was.
  std::shared_ptr<Party> put(std::shared_ptr<Party> party) {
    return std::exchange(members_[static_cast<std::size_t>(party->rank)], std::move(party));
  }

  /// An all-reduce of `group` among all its present holders, each result checked.
  void reduce(const std::string& group, std::size_t count, int salt) {
    std::vector<std::vector<std::int32_t>> values;
    std::vector<std::shared_ptr<Operation>> operations;
    const auto members = membersOf(group);
    for (Party* member : members) {
      std::vector<std::int32_t> own(count);
      for (std::size_t i = 0; i < count; ++i) own[i] = static_cast<std::int32_t>(i % 97) * salt + member->rank;
      values.push_back(std::move(own));
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      operations.push_back(
          start(members[i]->group(group), CollectiveKind::kAllReduce, {}, {bufferOf(values[i])}, 0, DataType::kInt32));
    }
    for (const auto& operation : operations) operation->wait(kCallLimit);
    int ranks = 0;
    for (const Party* member : members) ranks += member->rank;
    for (const auto& own : values) {
      for (std::size_t i = 0; i < count; ++i) {
        CHECK_EQ(own[i], static_cast<std::int32_t>(i % 97) * salt * static_cast<int>(members.size()) + ranks);
      }
    }
  }

  /// Each member of `group` sends to the next one: links them in a ring, whatever collectives do.
  void pass(const std::string& group, std::size_t count) {
    const auto members = membersOf(group);
    const int size = static_cast<int>(members.size());
    std::vector<std::vector<std::int32_t>> sent, got;
    std::vector<std::shared_ptr<Operation>> operations;
    for (const Party* member : members) {
      sent.emplace_back(count, member->rank);
      got.emplace_back(count, -1);
    }
    for (int i = 0; i < size; ++i) {
      Communicator& communicator = members[static_cast<std::size_t>(i)]->group(group);
      const int rank = communicator.rank();
      auto& out = sent[static_cast<std::size_t>(i)];
      auto& in = got[static_cast<std::size_t>(i)];
      operations.push_back(communicator.send(bufferOf(out), (rank + 1) % size, 77, kCallLimit));
      operations.push_back(communicator.receive(bufferOf(in), (rank + size - 1) % size, 77, kCallLimit));
    }
    for (const auto& operation : operations) operation->wait(kCallLimit);
    for (const auto& values : got) CHECK(values.front() >= 0 && values.front() == values.back());
  }

 private:
  std::vector<Party*> membersOf(const std::string& group) {
    std::vector<Party*> found;
    for (const auto& member : members_) {
      if (member->groups.count(group) != 0) found.push_back(member.get());
    }
    return found;
  }

  Groups groups_;
  std::vector<std::shared_ptr<Party>> members_;
};

inline void untilReady(Party& stayer, Generation generation) {
  eventually(
      [&] {
        const SwitchState state = stayer.runtime->switchState(generation);
        if (state.phase == SwitchPhase::kBroken) fail(__FILE__, __LINE__, "a switch broke: " + state.reason);
        return state.phase == SwitchPhase::kReady;
      },
      "everything is prepared");
}

inline std::string untilBroken(Party& stayer, Generation generation) {
  eventually([&] { return stayer.runtime->switchState(generation).phase == SwitchPhase::kBroken; },
             ("the switch breaks, generation " + std::to_string(generation)).c_str());
  return stayer.runtime->switchState(generation).reason;
}

}  // namespace trainmover::check
