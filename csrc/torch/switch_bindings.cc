// See switch_bindings.h. Every call releases the GIL: each takes the engine's lock, which another thread may hold.
#include "torch/switch_bindings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace trainmover {
namespace {

namespace py = pybind11;

/// (phase, reason)
std::pair<std::string, std::string> switchState(DataPlane& self, Generation generation) {
  const SwitchState state = self.runtime().switchState(generation);
  const char* phase = state.phase == SwitchPhase::kReady    ? "ready"
                      : state.phase == SwitchPhase::kBroken ? "broken"
                                                            : "pending";
  return {phase, state.reason};
}

/// (name, kept, replaced, dropped) of each communicator.
std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t>> commitSwitch(DataPlane& self,
                                                                                               Generation generation) {
  std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t>> tallies;
  for (const LinkTally& tally : self.runtime().commitSwitch(generation)) {
    tallies.emplace_back(tally.name, tally.kept, tally.replaced, tally.dropped);
  }
  return tallies;
}

using Places = std::map<std::string, std::vector<std::uint64_t>>;

/// The last recovery, and (started, messages, scheduled) of each communicator by name.
std::pair<Generation, Places> handover(DataPlane& self) {
  const Handover told = self.runtime().handover();
  Places places;
  for (const auto& [name, place] : told.places) places[name] = {place.started, place.messages, place.scheduled};
  return {told.recovery, places};
}

void goLive(DataPlane& self, Generation generation, Generation recovery, const Places& places) {
  Handover told;
  told.recovery = recovery;
  for (const auto& [name, place] : places) told.places[name] = {place.at(0), place.at(1), place.at(2)};
  self.runtime().goLive(generation, told);
}

/// (peer, generation, payload), or None.
py::object receiveNote(DataPlane& self, std::int64_t timeout_ms) {
  std::optional<Note> note;
  {
    const py::gil_scoped_release without_gil;
    note = self.runtime().receiveNote(std::chrono::milliseconds{timeout_ms});
  }
  if (!note) return py::none();
  return py::make_tuple(note->peer, note->generation, py::bytes(note->payload));
}

std::map<std::string, std::uint64_t> controlStats(DataPlane& self) {
  const ControlStats stats = self.runtime().controlStats();
  return {{"messages_sent", stats.messages_sent},
          {"messages_received", stats.messages_received},
          {"connections_made", stats.connections_made},
          {"connections_accepted", stats.connections_accepted},
          {"refused", stats.refused}};
}

}  // namespace

void bindSwitch(py::class_<DataPlane, std::shared_ptr<DataPlane>>& runtime) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  runtime
      .def(
          "prepare_switch",
          [](DataPlane& self, Generation generation, const std::map<int, Endpoint>& endpoints) {
            self.runtime().prepareSwitch(generation, endpoints);
          },
          py::arg("generation"), py::arg("endpoints"), without_gil)
      .def("switch_state", &switchState, py::arg("generation"), without_gil)
      .def("commit_switch", &commitSwitch, py::arg("generation"), without_gil)
      .def(
          "abort_switch", [](DataPlane& self, Generation generation) { self.runtime().abortSwitch(generation); },
          py::arg("generation"), without_gil)
      .def(
          "hold_links", [](DataPlane& self, Generation generation) { return self.runtime().holdLinks(generation); },
          py::arg("generation"), without_gil)
      .def("handover", &handover, without_gil)
      .def(
          "leave_switch", [](DataPlane& self, Generation generation) { self.runtime().leaveSwitch(generation); },
          py::arg("generation"), without_gil)
      .def(
          "join_switch", [](DataPlane& self, Generation generation) { self.runtime().joinSwitch(generation); },
          py::arg("generation"), without_gil)
      .def("go_live", &goLive, py::arg("generation"), py::arg("recovery"), py::arg("places"), without_gil)
      .def(
          "linked_ranks", [](DataPlane& self) { return self.runtime().linkedRanks(); }, without_gil)
      .def(
          "send_note",
          [](DataPlane& self, int peer, Generation generation, std::string payload) {
            const py::gil_scoped_release released;
            self.runtime().sendNote(peer, generation, std::move(payload));
          },
          py::arg("peer"), py::arg("generation"), py::arg("payload"))
      .def("receive_note", &receiveNote, py::arg("timeout_ms"))
      .def("control_stats", &controlStats, without_gil);
}

}  // namespace trainmover
