// Gives up Python's lock for a while: everything that can block does, since the progress thread may need it to go on.
#pragma once

#include <Python.h>

namespace trainmover {

/// Does nothing where the calling thread doesn't hold it, or Python has ended.
class WithoutGil {
 public:
  WithoutGil() : saved_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const saved_;
};

}  // namespace trainmover
