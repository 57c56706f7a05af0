// The vocabulary of the data plane: element types, reduce operations, generations. Used everywhere; knows no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trainmover {

/// Number of one change of the slot -> machine table; only grows, never reused (architecture, P1).
using Generation = std::uint64_t;

/// Element types a reduction understands. Moving data needs only bytes, so it takes any type.
enum class DataType : std::uint8_t {
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kBool,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

enum class ReduceOp : std::uint8_t { kSum, kAverage, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };

/// How numbers lie in memory while a reduction is under way: as the caller's elements, or as accumulators.
/// The two differ for 16-bit floats only, whose partial sums are kept, and travel, in fp32 (docs/decisions/0005).
enum class Form : std::uint8_t { kElement, kAccumulator };

/// Bytes of one element as the caller holds it.
constexpr std::size_t elementBytes(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUInt8:
    case DataType::kBool:
      return 1;
    case DataType::kInt16:
    case DataType::kUInt16:
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kUInt32:
    case DataType::kFloat32:
      return 4;
    case DataType::kInt64:
    case DataType::kUInt64:
    case DataType::kFloat64:
      return 8;
  }
  return 0;
}

/// Bytes of one accumulator: 4 for 16-bit floats, else as the element.
constexpr std::size_t accumulatorBytes(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 ? 4 : elementBytes(type);
}

constexpr std::size_t bytesOf(DataType type, Form form) {
  return form == Form::kElement ? elementBytes(type) : accumulatorBytes(type);
}

}  // namespace trainmover
