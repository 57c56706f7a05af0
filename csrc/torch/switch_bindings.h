// The switch and the notes, as the Python module trainmover_ext._C offers them. Called once, by bindings.cc; the Python
// face is trainmover_ext/switching.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "torch/data_plane.h"

namespace trainmover {

/// Adds to `runtime` what concerns a switch.
void bindSwitch(pybind11::class_<DataPlane, std::shared_ptr<DataPlane>>& runtime);

}  // namespace trainmover
