// See python_errors.h.
#include "torch/python_errors.h"

#include <torch/csrc/utils/pybind.h>

#include <new>
#include <stdexcept>

#include "base/errors.h"

namespace trainmover {
namespace {

namespace py = pybind11;

/// Classes of trainmover_ext.errors, kept for the life of the process.
struct Classes {
  PyObject* collective_error;
  PyObject* peer_lost;
  PyObject* collective_aborted;
  PyObject* collective_timeout;
  PyObject* collective_mismatch;
  PyObject* transport_error;
  PyObject* handshake_refused;
  PyObject* switch_error;
};
Classes classes{};

py::str textOf(const std::exception& error) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
      error.what(), static_cast<Py_ssize_t>(std::char_traits<char>::length(error.what())), "replace"));
}

template <typename... Arguments>
void raise(PyObject* type, const std::exception& error, const Arguments&... arguments) {
  try {
    const py::object instance = py::handle(type)(textOf(error), arguments...);
    PyErr_SetObject(type, instance.ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

py::object rankOrNone(int rank) { return rank < 0 ? py::none() : py::object(py::int_(rank)); }

/// Sets the Python error for errors of the data plane; lets others through.
void translate(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const PeerLost& e) {
    raise(classes.peer_lost, e, e.globalRank());
  } catch (const CollectiveAborted& e) {
    raise(classes.collective_aborted, e, e.generation(), rankOrNone(e.culprit()));
  } catch (const CollectiveTimeout& e) {
    raise(classes.collective_timeout, e);
  } catch (const CollectiveMismatch& e) {
    raise(classes.collective_mismatch, e);
  } catch (const TransportError& e) {
    raise(classes.transport_error, e);
  } catch (const HandshakeRefused& e) {
    raise(classes.handshake_refused, e);
  } catch (const SwitchError& e) {
    raise(classes.switch_error, e);
  } catch (const CollectiveError& e) {
    raise(classes.collective_error, e);
  }
}

}  // namespace

void registerPythonErrors() {
  const py::module_ errors = py::module_::import("trainmover_ext.errors");
  const auto take = [&errors](const char* name) { return py::object(errors.attr(name)).release().ptr(); };
  classes =
      Classes{take("CollectiveError"),    take("PeerLost"),       take("CollectiveAborted"), take("CollectiveTimeout"),
              take("CollectiveMismatch"), take("TransportError"), take("HandshakeRefused"),  take("SwitchError")};
  py::register_exception_translator(translate);
}

void setPythonError(const std::exception_ptr& error) {
  try {
    try {
      translate(error);
    } catch (py::error_already_set& e) {
      e.restore();
    } catch (const c10::NotImplementedError& e) {
      PyErr_SetString(PyExc_NotImplementedError, e.what_without_backtrace());
    } catch (const c10::TypeError& e) {
      PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
    } catch (const c10::ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
    } catch (const c10::Error& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::invalid_argument& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    }
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an error of unknown type left the data plane");
  }
}

}  // namespace trainmover
