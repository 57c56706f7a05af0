// Python's Communicator: collectives on tensors and buffers without torch.distributed, for callers to whom c10d's own
// few microseconds a call matter. The type is added to the module, and objects are made, by bindings.cc.
#pragma once

#include <Python.h>

#include <memory>

#include "torch/data_plane.h"

namespace trainmover {

/// The type, a new reference, or null with a Python error set. Classes of Python may derive from it.
PyObject* communicatorType();

/// An object of `type`, which is the above or derived from it. A new reference, or null with a Python error set.
PyObject* newCommunicator(PyObject* type, std::shared_ptr<OpenGroup> group);

}  // namespace trainmover
