// Arguments of the fast calls of communicator_object.cc: names, numbers, memory. Python's C API only, for speed.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>

#include "base/types.h"
#include "runtime/communicator.h"

namespace trainmover {

constexpr int kArgumentsMax = 5;

/// The arguments of a METH_FASTCALL | METH_KEYWORDS call in the order of `names`; null where not given. References are
/// borrowed. Throws std::invalid_argument, std::bad_alloc, or PythonErrorSet.
class Arguments {
 public:
  template <std::size_t kCount>
  Arguments(const char* function, const std::array<const char*, kCount>& names, PyObject* const* values,
            Py_ssize_t positional, PyObject* keyword_names) {
    static_assert(kCount <= kArgumentsMax, "raise kArgumentsMax");
    fill(function, names.data(), static_cast<int>(kCount), values, positional, keyword_names);
  }

  PyObject* operator[](int index) const { return values_[static_cast<std::size_t>(index)]; }

 private:
  void fill(const char* function, const char* const* names, int count, PyObject* const* values, Py_ssize_t positional,
            PyObject* keyword_names);

  std::array<PyObject*, kArgumentsMax> values_{};
};

/// A Python error is set already.
struct PythonErrorSet {};

/// The memory of a tensor or of anything that has the buffer protocol, contiguous; kept until this is destroyed, with
/// the GIL held.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void take(PyObject* object, const char* name, bool writable);
  Buffer buffer() const { return buffer_; }
  /// What a reduction with `op` works on.
  DataType reductionType(ReduceOp op) const;

 private:
  Buffer buffer_;
  PyObject* object_ = nullptr;  // borrowed, of the call
  bool is_tensor_ = false;
  Py_buffer view_{};
};

/// "sum", "avg", "product", "min", "max", "band", "bor", "bxor"; null: sum.
ReduceOp reduceOperation(PyObject* name);
/// A whole number; `fallback` when null.
std::int64_t wholeNumber(PyObject* value, const char* name, std::int64_t fallback);

}  // namespace trainmover
