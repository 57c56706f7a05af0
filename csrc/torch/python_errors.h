// The one place where errors of the data plane become Python's: classes of trainmover_ext.errors with the same names.
// Registered with pybind11, whose translators torch's own bindings share, so they arrive through torch.distributed too.
#pragma once

#include <exception>

namespace trainmover {

/// Looks the classes up and registers the translator. Called once, by the module, with the GIL held.
void registerPythonErrors();

/// Sets the Python error for `error`, of whatever type. With the GIL held.
void setPythonError(const std::exception_ptr& error);

}  // namespace trainmover
