// See communicator_object.h. Every method blocks, without the GIL. Arguments come by METH_FASTCALL: pybind11's dispatch
// would take longer than a small operation itself.
#include "torch/communicator_object.h"

#include <structmember.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "torch/parts.h"
#include "torch/python_arguments.h"
#include "torch/python_errors.h"
#include "torch/without_gil.h"

namespace trainmover {
namespace {

struct CommunicatorObject {
  PyObject_HEAD std::shared_ptr<OpenGroup> group;
};

OpenGroup& groupOf(PyObject* self) { return *reinterpret_cast<CommunicatorObject*>(self)->group; }

/// Runs `body`, which returns a new reference, and turns what it throws into a Python error.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const PythonErrorSet&) {
    return nullptr;
  } catch (...) {
    setPythonError(std::current_exception());
    return nullptr;
  }
}

PyObject* none() { Py_RETURN_NONE; }

PyObject* run(Communicator& communicator, CollectiveCall& call, PyObject* timeout_ms) {
  call.timeout = std::chrono::milliseconds{wholeNumber(timeout_ms, "timeout_ms", 0)};
  call.waited_at_once = true;
  {
    const WithoutGil without_gil;
    communicator.start(call)->wait();
  }
  return none();
}

/// One equal part for each rank.
void cutForRanks(std::vector<Buffer>& parts, const char* name, Buffer whole, int size) {
  if (whole.bytes % static_cast<std::size_t>(size) != 0) {
    throw std::invalid_argument(std::string(name) + ": found " + std::to_string(whole.bytes) +
                                " bytes; expected a multiple of the " + std::to_string(size) + " ranks");
  }
  appendEqualParts(parts, whole, size);
}

int rootOf(PyObject* value) { return static_cast<int>(wholeNumber(value, "root", 0)); }

PyObject* allReduce(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "output", "op", "timeout_ms"};
    const Arguments arguments("all_reduce", kNames, values, positional, keywords);
    // all_reduce(buffer, "max") is as good as all_reduce(buffer, op="max").
    const bool op_second = arguments[1] != nullptr && PyUnicode_Check(arguments[1]);
    const bool in_place = arguments[1] == nullptr || op_second;
    CollectiveCall call;
    call.kind = CollectiveKind::kAllReduce;
    call.op = reduceOperation(op_second ? arguments[1] : arguments[2]);
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", in_place);
    call.dtype = input.reductionType(call.op);
    if (in_place) {
      call.outputs = {input.buffer()};
    } else {
      output.take(arguments[1], "output", true);
      call.inputs = {input.buffer()};
      call.outputs = {output.buffer()};
    }
    return run(groupOf(self).communicator(), call, arguments[3]);
  });
}

PyObject* reduceScatter(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "output", "op", "timeout_ms"};
    const Arguments arguments("reduce_scatter", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kReduceScatter;
    call.op = reduceOperation(arguments[2]);
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", false);
    output.take(arguments[1], "output", true);
    call.dtype = input.reductionType(call.op);
    cutForRanks(call.inputs, "buffer", input.buffer(), communicator.size());
    call.outputs = {output.buffer()};
    return run(communicator, call, arguments[3]);
  });
}

PyObject* allGather(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 3> kNames = {"buffer", "output", "timeout_ms"};
    const Arguments arguments("all_gather", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kAllGather;
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", false);
    output.take(arguments[1], "output", true);
    call.inputs = {input.buffer()};
    cutForRanks(call.outputs, "output", output.buffer(), communicator.size());
    return run(communicator, call, arguments[2]);
  });
}

PyObject* broadcast(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 3> kNames = {"buffer", "root", "timeout_ms"};
    const Arguments arguments("broadcast", kNames, values, positional, keywords);
    CollectiveCall call;
    call.kind = CollectiveKind::kBroadcast;
    call.root = rootOf(arguments[1]);
    Memory memory;
    memory.take(arguments[0], "buffer", true);
    call.outputs = {memory.buffer()};
    return run(groupOf(self).communicator(), call, arguments[2]);
  });
}

PyObject* reduce(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 5> kNames = {"buffer", "output", "op", "root", "timeout_ms"};
    const Arguments arguments("reduce", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kReduce;
    call.op = reduceOperation(arguments[2]);
    call.root = rootOf(arguments[3]);
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", false);
    call.dtype = input.reductionType(call.op);
    call.inputs = {input.buffer()};
    if (communicator.rank() == call.root) {
      output.take(arguments[1], "output", true);
      call.outputs = {output.buffer()};
    }
    return run(communicator, call, arguments[4]);
  });
}

PyObject* gather(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "output", "root", "timeout_ms"};
    const Arguments arguments("gather", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kGather;
    call.root = rootOf(arguments[2]);
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", false);
    call.inputs = {input.buffer()};
    if (communicator.rank() == call.root) {
      output.take(arguments[1], "output", true);
      cutForRanks(call.outputs, "output", output.buffer(), communicator.size());
    }
    return run(communicator, call, arguments[3]);
  });
}

PyObject* scatter(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "output", "root", "timeout_ms"};
    const Arguments arguments("scatter", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kScatter;
    call.root = rootOf(arguments[2]);
    Memory input;
    Memory output;
    if (communicator.rank() == call.root) {
      input.take(arguments[0], "buffer", false);
      cutForRanks(call.inputs, "buffer", input.buffer(), communicator.size());
    }
    output.take(arguments[1], "output", true);
    call.outputs = {output.buffer()};
    return run(communicator, call, arguments[3]);
  });
}

PyObject* allToAll(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 3> kNames = {"buffer", "output", "timeout_ms"};
    const Arguments arguments("all_to_all", kNames, values, positional, keywords);
    Communicator& communicator = groupOf(self).communicator();
    CollectiveCall call;
    call.kind = CollectiveKind::kAllToAll;
    Memory input;
    Memory output;
    input.take(arguments[0], "buffer", false);
    output.take(arguments[1], "output", true);
    cutForRanks(call.inputs, "buffer", input.buffer(), communicator.size());
    cutForRanks(call.outputs, "output", output.buffer(), communicator.size());
    return run(communicator, call, arguments[2]);
  });
}

PyObject* barrier(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 1> kNames = {"timeout_ms"};
    const Arguments arguments("barrier", kNames, values, positional, keywords);
    CollectiveCall call;
    call.kind = CollectiveKind::kBarrier;
    return run(groupOf(self).communicator(), call, arguments[0]);
  });
}

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "to", "tag", "timeout_ms"};
    const Arguments arguments("send", kNames, values, positional, keywords);
    Memory memory;
    memory.take(arguments[0], "buffer", false);
    const auto to = static_cast<int>(wholeNumber(arguments[1], "to", -1));
    const std::int64_t tag = wholeNumber(arguments[2], "tag", 0);
    const std::chrono::milliseconds timeout{wholeNumber(arguments[3], "timeout_ms", 0)};
    {
      const WithoutGil without_gil;
      groupOf(self).communicator().send(memory.buffer(), to, tag, timeout, /*waited_at_once=*/true)->wait();
    }
    return none();
  });
}

/// Returns the group rank of the sender.
PyObject* receive(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&] {
    static constexpr std::array<const char*, 4> kNames = {"buffer", "source", "tag", "timeout_ms"};
    const Arguments arguments("recv", kNames, values, positional, keywords);
    Memory memory;
    memory.take(arguments[0], "buffer", true);
    const auto source = static_cast<int>(wholeNumber(arguments[1], "source", kAnySource));
    const std::int64_t tag = wholeNumber(arguments[2], "tag", 0);
    const std::chrono::milliseconds timeout{wholeNumber(arguments[3], "timeout_ms", 0)};
    int sender = -1;
    {
      const WithoutGil without_gil;
      const auto operation =
          groupOf(self).communicator().receive(memory.buffer(), source, tag, timeout, /*waited_at_once=*/true);
      operation->wait();
      sender = operation->sourceRank();
    }
    return PyLong_FromLong(sender);
  });
}

PyObject* sleepWhileWaiting(PyObject* self, PyObject* /*unused*/) {
  groupOf(self).communicator().sleepWhileWaiting();
  return none();
}

PyObject* close(PyObject* self, PyObject* /*unused*/) {
  return guarded([&] {
    {
      const WithoutGil without_gil;
      groupOf(self).close();
    }
    return none();
  });
}

PyObject* getRank(PyObject* self, void* /*unused*/) { return PyLong_FromLong(groupOf(self).communicator().rank()); }

PyObject* getSize(PyObject* self, void* /*unused*/) { return PyLong_FromLong(groupOf(self).communicator().size()); }

PyObject* getName(PyObject* self, void* /*unused*/) {
  return PyUnicode_FromString(groupOf(self).communicator().name().c_str());
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  {
    // Closing may wait for the progress thread, and that for the GIL.
    PyObject *kind = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&kind, &value, &traceback);
    std::shared_ptr<OpenGroup> group = std::move(reinterpret_cast<CommunicatorObject*>(self)->group);
    reinterpret_cast<CommunicatorObject*>(self)->group.~shared_ptr();
    {
      const WithoutGil without_gil;
      group.reset();
    }
    PyErr_Restore(kind, value, traceback);
  }
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Function>
PyMethodDef fast(const char* name, Function function, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL | METH_KEYWORDS,
          doc};
}

PyMethodDef methods[] = {
    fast("all_reduce", allReduce, "Reduces over all ranks, in place or into `output`."),
    fast("reduce_scatter", reduceScatter, "Reduces, and gives each rank its part."),
    fast("all_gather", allGather, "Collects the parts of all ranks, on all."),
    fast("broadcast", broadcast, "Copies root's buffer to all ranks."),
    fast("reduce", reduce, "Reduces over all ranks into root's `output`."),
    fast("gather", gather, "Collects the parts of all ranks in root's `output`."),
    fast("scatter", scatter, "Gives each rank its part of root's `buffer`."),
    fast("all_to_all", allToAll, "Gives each rank its part of every buffer."),
    fast("barrier", barrier, "Returns when all ranks have called."),
    fast("send", send, "Sends to one rank."),
    fast("recv", receive, "Receives from one rank, or from any; returns the sender."),
    {"sleep_while_waiting", sleepWhileWaiting, METH_NOARGS, "From now on waits sleep at once: for those that last."},
    {"close", close, METH_NOARGS, "Fails what is outstanding and drops the links."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"rank", getRank, nullptr, "Rank of this process in the group.", nullptr},
    {"size", getSize, nullptr, "Number of ranks.", nullptr},
    {"name", getName, nullptr, "The same on all ranks, unique in the job.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

PyObject* communicatorType() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
      {Py_tp_methods, methods},
      {Py_tp_getset, properties},
      {Py_tp_doc, const_cast<char*>("A group of ranks that communicate without torch.distributed.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"trainmover_ext._C.Communicator", sizeof(CommunicatorObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return PyType_FromSpec(&spec);
}

PyObject* newCommunicator(PyObject* type, std::shared_ptr<OpenGroup> group) {
  auto* const python_type = reinterpret_cast<PyTypeObject*>(type);
  PyObject* const self = python_type->tp_alloc(python_type, 0);
  if (self != nullptr) {
    new (&reinterpret_cast<CommunicatorObject*>(self)->group) std::shared_ptr<OpenGroup>(std::move(group));
  }
  return self;
}

}  // namespace trainmover
