// The Python module trainmover_ext._C: the runtime of this process, its settings, its groups. Everything that can block
// releases the GIL. The Python side (trainmover_ext/rendezvous.py) decides when to make what; here it is only passed
// on.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collectives/reduction_order.h"
#include "collectives/schedule.h"
#include "collectives/topology.h"
#include "runtime/runtime.h"
#include "torch/backend.h"
#include "torch/communicator_object.h"
#include "torch/data_plane.h"
#include "torch/python_errors.h"
#include "torch/switch_bindings.h"
#include "wire/handshake.h"

namespace trainmover {
namespace {

namespace py = pybind11;
using std::chrono::milliseconds;

/// What all ranks must agree on, hashed into every handshake.
std::string jobConstants() {
  return "protocol=" + std::to_string(kProtocolVersion) + ";chunk_bytes=" + std::to_string(kChunkBytes) +
         ";ring_bytes_per_rank=" + std::to_string(kRingBytesPerRank) + ";direct_size=" + std::to_string(kDirectSize);
}

std::shared_ptr<DataPlane> createDataPlane(int global_rank, const std::string& job_id, const std::string& token,
                                           const Settings& settings, bool isolated) {
  return std::make_shared<DataPlane>(Runtime::create(global_rank, JobIdentity{job_id, token, jobConstants()}, settings,
                                                     isolated ? Mode::kIsolated : Mode::kLive));
}

c10::intrusive_ptr<c10d::Backend> createBackend(const std::shared_ptr<DataPlane>& data_plane, const std::string& name,
                                                const std::vector<int>& global_ranks, std::int64_t timeout_ms,
                                                bool world) {
  const milliseconds timeout{timeout_ms};
  return c10::make_intrusive<Backend>(data_plane->open(name, global_ranks, timeout, world), global_ranks, timeout);
}

py::object openCommunicator(const py::object& type, const std::shared_ptr<DataPlane>& data_plane,
                            const std::string& name, const std::vector<int>& global_ranks, std::int64_t timeout_ms) {
  std::shared_ptr<OpenGroup> group;
  {
    const py::gil_scoped_release without_gil;
    group = data_plane->open(name, global_ranks, milliseconds{timeout_ms}, false);
  }
  py::object made = py::reinterpret_steal<py::object>(newCommunicator(type.ptr(), std::move(group)));
  if (!made) {
    throw py::error_already_set();
  }
  return made;
}

/// Calls a Python function from the progress thread. Python that is ending, or has ended, is left alone. Errors are
/// reported, not thrown: nobody up there could take them.
class PythonCallback {
 public:
  explicit PythonCallback(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* held) {
          if (Py_IsInitialized() != 0) {
            const py::gil_scoped_acquire gil;
            delete held;
          }  // else leaked: the interpreter that it belongs to is gone
        }) {}

  void operator()() const {
    if (Py_IsInitialized() == 0 || finalizing()) {
      return;
    }
    const py::gil_scoped_acquire gil;
    try {
      (*function_)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("trainmover_ext: the callback of an abort");
    }
  }

 private:
  static bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }

  std::shared_ptr<py::function> function_;
};

const char* nameOf(FlightRecord::State state) {
  switch (state) {
    case FlightRecord::State::kScheduled:
      return "scheduled";
    case FlightRecord::State::kStarted:
      return "started";
    case FlightRecord::State::kCompleted:
      return "completed";
    case FlightRecord::State::kFailed:
      return "failed";
  }
  return "?";
}

/// As torch names element types.
const char* nameOf(DataType type) {
  switch (type) {
    case DataType::kInt8:
      return "Char";
    case DataType::kUInt8:
      return "Byte";
    case DataType::kInt16:
      return "Short";
    case DataType::kUInt16:
      return "UInt16";
    case DataType::kInt32:
      return "Int";
    case DataType::kUInt32:
      return "UInt32";
    case DataType::kInt64:
      return "Long";
    case DataType::kUInt64:
      return "UInt64";
    case DataType::kBool:
      return "Bool";
    case DataType::kFloat16:
      return "Half";
    case DataType::kBFloat16:
      return "BFloat16";
    case DataType::kFloat32:
      return "Float";
    case DataType::kFloat64:
      return "Double";
  }
  return "?";
}

py::list flightRecords(DataPlane& data_plane) {
  std::vector<FlightRecord> records;
  {
    const py::gil_scoped_release without_gil;
    records = data_plane.runtime().flightRecorder().records();
  }
  py::list list;
  for (const FlightRecord& record : records) {
    py::dict entry;
    entry["record_id"] = record.record_id;
    entry["communicator"] = record.communicator;
    entry["operation"] = record.operation;
    entry["peer"] = record.peer;
    entry["point_to_point"] = record.point_to_point;
    entry["sequence"] = record.sequence;
    entry["input_bytes"] = record.input_bytes;
    entry["output_bytes"] = record.output_bytes;
    entry["dtype"] = nameOf(record.dtype);
    entry["element_bytes"] = elementBytes(record.dtype);
    entry["generation"] = record.generation;
    entry["iteration"] = record.iteration;
    entry["timeout_ms"] = record.timeout_ms;
    entry["created_ns"] = record.created_ns;
    entry["started_ns"] = record.started_ns;
    entry["ended_ns"] = record.ended_ns;
    entry["state"] = nameOf(record.state);
    list.append(std::move(entry));
  }
  return list;
}

py::list communicatorStats(DataPlane& data_plane) {
  std::vector<CommunicatorStats> all;
  {
    const py::gil_scoped_release without_gil;
    all = data_plane.runtime().communicatorStats();
  }
  py::list list;
  for (const CommunicatorStats& stats : all) {
    py::dict entry;
    entry["name"] = stats.name;
    entry["size"] = stats.size;
    entry["rank"] = stats.rank;
    entry["operations"] = stats.operations;
    entry["links"] = stats.links;
    entry["links_kept"] = stats.links_kept;
    entry["links_replaced"] = stats.links_replaced;
    entry["bytes_sent"] = stats.bytes_sent;
    entry["bytes_received"] = stats.bytes_received;
    entry["waits"] = stats.waits;
    entry["sleeps"] = stats.sleeps;
    entry["wait_us"] = stats.wait_us;
    list.append(std::move(entry));
  }
  return list;
}

std::map<std::string, std::uint64_t> memoryStats(DataPlane& data_plane) {
  const MemoryStats stats = data_plane.runtime().memoryStats();
  return {{"shared_segments", stats.shared_segments},
          {"link_buffers", stats.link_buffers},
          {"unexpected_messages", stats.unexpected_messages},
          {"scratch", stats.scratch},
          {"flight_recorder", stats.flight_recorder}};
}

void bindSettings(py::module_& module) {
  py::class_<Settings>(module, "Settings")
      .def(py::init<>())
      .def_readwrite("bind_address", &Settings::bind_address)
      .def_readwrite("machine_id", &Settings::machine_id)
      .def_readwrite("peer_timeout_ms", &Settings::peer_timeout_ms)
      .def_readwrite("connect_timeout_ms", &Settings::connect_timeout_ms)
      .def_readwrite("use_shared_memory", &Settings::use_shared_memory)
      .def_readwrite("use_cross_memory", &Settings::use_cross_memory)
      .def_readwrite("local_ranks", &Settings::local_ranks)
      .def_readwrite("flight_recorder_path", &Settings::flight_recorder_path)
      .def_readwrite("flight_recorder_entries", &Settings::flight_recorder_entries)
      .def_readwrite("trace_path", &Settings::trace_path);
  py::class_<Endpoint>(module, "Endpoint")
      .def(py::init<>())
      .def_readwrite("incarnation", &Endpoint::incarnation)
      .def_readwrite("machine_id", &Endpoint::machine_id)
      .def_readwrite("address", &Endpoint::address)
      .def_readwrite("socket", &Endpoint::socket)
      .def_readwrite("pid", &Endpoint::pid);
}

void bindRuntime(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<DataPlane, std::shared_ptr<DataPlane>> runtime(module, "Runtime");
  bindSwitch(runtime);
  runtime
      .def(py::init(&createDataPlane), py::arg("global_rank"), py::arg("job_id"), py::arg("token"), py::arg("settings"),
           py::arg("isolated"), without_gil)
      .def("create_backend", &createBackend, py::arg("name"), py::arg("global_ranks"), py::arg("timeout_ms"),
           py::arg("world"), without_gil)
      .def_property_readonly("global_rank", [](DataPlane& self) { return self.runtime().globalRank(); })
      .def_property_readonly("isolated", [](DataPlane& self) { return self.runtime().mode() == Mode::kIsolated; })
      .def(
          "set_isolated",
          [](DataPlane& self, bool isolated) { self.runtime().setMode(isolated ? Mode::kIsolated : Mode::kLive); },
          py::arg("isolated"), without_gil)
      .def(
          "endpoint", [](DataPlane& self) { return self.runtime().endpoint(); }, without_gil)
      .def(
          "add_endpoints",
          [](DataPlane& self, const std::map<int, Endpoint>& endpoints, Generation generation) {
            self.runtime().addEndpoints(endpoints, generation);
          },
          py::arg("endpoints"), py::arg("generation") = 1, without_gil)
      .def(
          "knows", [](DataPlane& self, int global_rank) { return self.runtime().knows(global_rank); }, without_gil)
      .def(
          "generation", [](DataPlane& self) { return self.runtime().generation(); }, without_gil)
      .def(
          "aborted", [](DataPlane& self) { return self.runtime().aborted(); }, without_gil)
      .def(
          "abort_collectives",
          [](DataPlane& self, int culprit, const std::string& reason) {
            self.runtime().abortCollectives(culprit, reason);
          },
          py::arg("culprit"), py::arg("reason"), without_gil)
      .def(
          "resume",
          [](DataPlane& self, Generation generation, const std::map<int, Endpoint>& endpoints) {
            self.runtime().resume(generation, endpoints);
          },
          py::arg("generation"), py::arg("endpoints"), without_gil)
      .def("memory_stats", &memoryStats, without_gil)
      .def("communicator_stats", &communicatorStats)
      .def("flight_records", &flightRecords)
      .def(
          "note_iteration", [](DataPlane& self, std::uint64_t iteration) { self.runtime().noteIteration(iteration); },
          py::arg("iteration"))
      .def(
          "on_abort",
          [](DataPlane& self, py::function function) {
            PythonCallback callback(std::move(function));
            const py::gil_scoped_release released;
            self.runtime().onAbort(std::move(callback));
          },
          py::arg("callback"))
      .def("shutdown", &DataPlane::shutdown, without_gil)
      .def("ended", &DataPlane::ended, without_gil);
}

void bindCommunicator(py::module_& module) {
  const py::object type = py::reinterpret_steal<py::object>(communicatorType());
  if (!type) {
    throw py::error_already_set();
  }
  module.attr("Communicator") = type;
  module.def("open_communicator", &openCommunicator, py::arg("type"), py::arg("runtime"), py::arg("name"),
             py::arg("global_ranks"), py::arg("timeout_ms"));
}

}  // namespace
}  // namespace trainmover

PYBIND11_MODULE(_C, module) {
  module.doc() = "The data plane of trainmover (built from csrc/).";
  trainmover::registerPythonErrors();
  trainmover::bindSettings(module);
  trainmover::bindRuntime(module);
  trainmover::bindCommunicator(module);
  module.def("job_constants", &trainmover::jobConstants);
}
