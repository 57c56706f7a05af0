// See python_arguments.h.
#include "torch/python_arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "reduce/kernels.h"
#include "torch/executor.h"
#include "torch/tensors.h"

namespace trainmover {
namespace {

std::string typeName(PyObject* object) { return Py_TYPE(object)->tp_name; }

int signedOfSize(std::size_t bytes) {
  switch (bytes) {
    case 1:
      return static_cast<int>(DataType::kInt8);
    case 2:
      return static_cast<int>(DataType::kInt16);
    case 4:
      return static_cast<int>(DataType::kInt32);
    case 8:
      return static_cast<int>(DataType::kInt64);
    default:
      return -1;
  }
}

int unsignedOfSize(std::size_t bytes) {
  const int with_sign = signedOfSize(bytes);
  return with_sign < 0 ? -1 : with_sign + 1;
}

static_assert(static_cast<int>(DataType::kUInt8) == static_cast<int>(DataType::kInt8) + 1 &&
                  static_cast<int>(DataType::kUInt16) == static_cast<int>(DataType::kInt16) + 1 &&
                  static_cast<int>(DataType::kUInt32) == static_cast<int>(DataType::kInt32) + 1 &&
                  static_cast<int>(DataType::kUInt64) == static_cast<int>(DataType::kInt64) + 1,
              "unsignedOfSize relies on the order");

/// Number of the DataType of a format of the struct module (native byte order), -1 for others.
int typeOfFormat(const char* format, std::size_t bytes) {
  if (format == nullptr) {
    return static_cast<int>(DataType::kUInt8);
  }
  if (*format == '@' || *format == '=' || *format == '<') {
    ++format;
  }
  if (std::strlen(format) != 1) {
    return -1;
  }
  switch (*format) {
    case '?':
      return static_cast<int>(DataType::kBool);
    case 'e':
      return static_cast<int>(DataType::kFloat16);
    case 'f':
      return static_cast<int>(DataType::kFloat32);
    case 'd':
      return static_cast<int>(DataType::kFloat64);
    default:
      break;
  }
  if (std::strchr("bhilqn", *format) != nullptr) {
    return signedOfSize(bytes);
  }
  return std::strchr("BHILQN", *format) != nullptr ? unsignedOfSize(bytes) : -1;
}

}  // namespace

void Arguments::fill(const char* function, const char* const* names, int count, PyObject* const* values,
                     Py_ssize_t positional, PyObject* keyword_names) {
  if (positional > count) {
    throw std::invalid_argument(std::string(function) + ": found " + std::to_string(positional) +
                                " positional arguments; expected at most " + std::to_string(count));
  }
  for (Py_ssize_t index = 0; index < positional; ++index) {
    values_[static_cast<std::size_t>(index)] = values[index] == Py_None ? nullptr : values[index];
  }
  const Py_ssize_t keywords = keyword_names == nullptr ? 0 : PyTuple_GET_SIZE(keyword_names);
  for (Py_ssize_t keyword = 0; keyword < keywords; ++keyword) {
    PyObject* const name = PyTuple_GET_ITEM(keyword_names, keyword);
    int index = 0;
    while (index < count && PyUnicode_CompareWithASCIIString(name, names[index]) != 0) {
      ++index;
    }
    if (index == count || index < positional) {
      const char* const text = PyUnicode_AsUTF8(name);
      throw std::invalid_argument(std::string(function) + ": argument " + (text == nullptr ? "?" : text) +
                                  (index == count ? " is not known" : " was given twice"));
    }
    PyObject* const value = values[positional + keyword];
    values_[static_cast<std::size_t>(index)] = value == Py_None ? nullptr : value;
  }
}

Memory::~Memory() {
  if (view_.obj != nullptr) {
    PyBuffer_Release(&view_);
  }
}

void Memory::take(PyObject* object, const char* name, bool writable) {
  if (object == nullptr) {
    throw std::invalid_argument(std::string(name) + ": found nothing; expected a tensor or a buffer");
  }
  object_ = object;
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    executorFor(tensor.device());
    if (tensor.layout() != at::kStrided || !isPlain(tensor)) {
      throw std::invalid_argument(std::string(name) +
                                  ": found a tensor that is not contiguous; call contiguous() first");
    }
    is_tensor_ = true;
    buffer_ = memoryOf(tensor);
    return;
  }
  if (PyObject_GetBuffer(object, &view_, PyBUF_FORMAT | PyBUF_ND | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) != 0) {
      PyErr_Clear();
      throw std::invalid_argument(std::string(name) + ": found " + typeName(object) +
                                  "; expected a tensor or an object with the buffer protocol");
    }
    throw PythonErrorSet();  // says itself that the memory is read-only or not contiguous
  }
  buffer_ = Buffer{view_.buf, static_cast<std::size_t>(view_.len)};
}

DataType Memory::reductionType(ReduceOp op) const {
  if (is_tensor_) {
    return trainmover::reductionType(THPVariable_Unpack(object_).scalar_type(), op);
  }
  const int number = typeOfFormat(view_.format, static_cast<std::size_t>(view_.itemsize));
  if (number < 0) {
    throw std::invalid_argument(std::string("found elements of format '") + view_.format +
                                "'; expected bool, an integer of 8 to 64 bits or a float of 16 to 64");
  }
  const auto type = static_cast<DataType>(number);
  if (!reducible(type, op)) {
    throw std::invalid_argument(std::string("found a reduce operation that is not defined for elements of format '") +
                                (view_.format == nullptr ? "B" : view_.format) +
                                "': bit operations are for integers, avg for floats");
  }
  return type;
}

ReduceOp reduceOperation(PyObject* name) {
  if (name == nullptr) {
    return ReduceOp::kSum;
  }
  static constexpr std::array<const char*, 8> kNames = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  const char* const text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  for (std::size_t index = 0; text != nullptr && index < kNames.size(); ++index) {
    if (std::strcmp(text, kNames[index]) == 0) {
      return static_cast<ReduceOp>(index);
    }
  }
  PyErr_Clear();
  throw std::invalid_argument("op: found " + (text == nullptr ? typeName(name) : "'" + std::string(text) + "'") +
                              "; expected sum, avg, product, min, max, band, bor or bxor");
}

std::int64_t wholeNumber(PyObject* value, const char* name, std::int64_t fallback) {
  if (value == nullptr) {
    return fallback;
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw std::invalid_argument(std::string(name) + ": found " + typeName(value) + "; expected a whole number");
  }
  return number;
}

}  // namespace trainmover
