// What reductions must give, written from the words of collectives/reduction_order.h and reduce/kernels.h: one element
// at a time, 16-bit floats by way of real numbers. Slow, and shares no code with what it checks. For tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/types.h"
#include "collectives/reduction_order.h"

namespace trainmover::reference {

template <typename T>
T bitsTo(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline float floatOf(std::uint32_t bits) { return bitsTo<float>(&bits); }
inline std::uint32_t bitsOf(float value) { return bitsTo<std::uint32_t>(&value); }

inline float widened(DataType type, std::uint16_t half) {
  if (type == DataType::kBFloat16) return floatOf(std::uint32_t{half} << 16);
  const bool negative = (half & 0x8000) != 0;
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 0x3ff;
  if (exponent == 31 && mantissa != 0) return floatOf((negative ? 0xffc00000U : 0x7fc00000U) | mantissa << 13);
  double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) value = std::numeric_limits<double>::infinity();
  return static_cast<float>(negative ? -value : value);
}

/// Rounds by trying: the 16-bit number nearest to `value`, the even one of two.
inline std::uint16_t narrowed(DataType type, float value) {
  const std::uint32_t bits = bitsOf(value);
  const bool bfloat = type == DataType::kBFloat16;
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(bfloat ? bits >> 16 | 0x40 : sign | 0x7e00 | (bits >> 13 & 0x3ff));
  }
  const int bits_kept = bfloat ? 8 : 11;  // of the significand, the hidden one included
  const int exponent_min = bfloat ? -126 : -14;
  const int bias = bfloat ? 127 : 15;
  const double magnitude = std::fabs(static_cast<double>(value));
  const double infinity_from = std::ldexp(2.0 - std::ldexp(1.0, -bits_kept), bias);
  const int shift = bits_kept - 1;
  if (magnitude >= infinity_from) return static_cast<std::uint16_t>(sign | (2 * bias + 1) << shift);
  int exponent = exponent_min;
  while (exponent < bias && magnitude >= std::ldexp(1.0, exponent + 1)) ++exponent;
  // In units of the last bit; nearbyint rounds to even. A carry into the next exponent adds up by itself.
  const double units = std::nearbyint(std::ldexp(magnitude, shift - exponent));
  const long subnormal_base = static_cast<long>(exponent - exponent_min) << shift;
  return static_cast<std::uint16_t>(sign | (subnormal_base + static_cast<long>(units)));
}

template <typename T>
T combine(ReduceOp op, T a, T b) {
  T result{};
  if (op == ReduceOp::kSum || op == ReduceOp::kAverage) result = static_cast<T>(a + b);
  if (op == ReduceOp::kProduct) result = static_cast<T>(a * b);
  if (op == ReduceOp::kMin) result = b < a ? b : a;
  if (op == ReduceOp::kMax) result = b > a ? b : a;
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b) || std::isnan(result)) result = std::numeric_limits<T>::quiet_NaN();
  } else {
    if (op == ReduceOp::kBitAnd) result = static_cast<T>(a & b);
    if (op == ReduceOp::kBitOr) result = static_cast<T>(a | b);
    if (op == ReduceOp::kBitXor) result = static_cast<T>(a ^ b);
  }
  return result;
}

/// Signed numbers wrap: added and multiplied as unsigned 64-bit ones, then cut.
template <typename T>
T combineInteger(ReduceOp op, T a, T b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  if (op == ReduceOp::kSum) return static_cast<T>(x + y);
  if (op == ReduceOp::kProduct) return static_cast<T>(x * y);
  return combine<T>(op, a, b);
}

inline void combineBytes(DataType type, ReduceOp op, void* a, const void* b) {
  const auto apply = [&](auto zero, auto function) {
    using T = decltype(zero);
    const T result = function(op, bitsTo<T>(a), bitsTo<T>(b));
    std::memcpy(a, &result, sizeof result);
  };
  switch (type) {
    case DataType::kInt8:
      return apply(std::int8_t{}, &combineInteger<std::int8_t>);
    case DataType::kUInt8:
      return apply(std::uint8_t{}, &combineInteger<std::uint8_t>);
    case DataType::kInt16:
      return apply(std::int16_t{}, &combineInteger<std::int16_t>);
    case DataType::kUInt16:
      return apply(std::uint16_t{}, &combineInteger<std::uint16_t>);
    case DataType::kInt32:
      return apply(std::int32_t{}, &combineInteger<std::int32_t>);
    case DataType::kUInt32:
      return apply(std::uint32_t{}, &combineInteger<std::uint32_t>);
    case DataType::kInt64:
      return apply(std::int64_t{}, &combineInteger<std::int64_t>);
    case DataType::kUInt64:
      return apply(std::uint64_t{}, &combineInteger<std::uint64_t>);
    case DataType::kBool:
      return apply(
          std::uint8_t{}, +[](ReduceOp o, std::uint8_t x, std::uint8_t y) {
            const bool either = o == ReduceOp::kSum || o == ReduceOp::kMax || o == ReduceOp::kBitOr;
            const bool result = either ? x || y : o == ReduceOp::kBitXor ? !x != !y : x && y;
            return static_cast<std::uint8_t>(result);
          });
    case DataType::kFloat64:
      return apply(double{}, &combine<double>);
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
      return apply(float{}, &combine<float>);
  }
}

using Bytes = std::vector<std::uint8_t>;

inline bool isHalf(DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; }

/// One accumulator of an element.
inline Bytes accumulatorOf(DataType type, const std::uint8_t* element) {
  if (!isHalf(type)) return Bytes(element, element + elementBytes(type));
  const float value = widened(type, bitsTo<std::uint16_t>(element));
  Bytes bytes(4);
  std::memcpy(bytes.data(), &value, 4);
  return bytes;
}

inline Bytes finished(DataType type, ReduceOp op, int size, Bytes accumulator) {
  if (op == ReduceOp::kAverage && type == DataType::kFloat64) {
    const double value = bitsTo<double>(accumulator.data()) / size;
    std::memcpy(accumulator.data(), &value, sizeof value);
  } else if (op == ReduceOp::kAverage) {
    const float value = bitsTo<float>(accumulator.data()) / static_cast<float>(size);
    std::memcpy(accumulator.data(), &value, sizeof value);
  }
  if (!isHalf(type)) return accumulator;
  const std::uint16_t half = narrowed(type, bitsTo<float>(accumulator.data()));
  Bytes bytes(2);
  std::memcpy(bytes.data(), &half, 2);
  return bytes;
}

/// One element of all ranks, combined as reduction_order.h says.
inline Bytes referenceOf(ReductionOrder order, int owner, DataType type, ReduceOp op,
                         const std::vector<Bytes>& elements) {
  const int size = static_cast<int>(elements.size());
  if (size == 1) return elements[0];
  std::vector<Bytes> x;
  for (const Bytes& element : elements) x.push_back(accumulatorOf(type, element.data()));
  if (order == ReductionOrder::kRing) {
    Bytes result = x[(owner + 1) % size];
    for (int i = 2; i <= size; ++i) combineBytes(type, op, result.data(), x[(owner + i) % size].data());
    return finished(type, op, size, result);
  }
  int width = 1;
  while (2 * width <= size) width *= 2;
  for (int r = 0; r + width < size; ++r) combineBytes(type, op, x[r].data(), x[r + width].data());
  for (int distance = width / 2; distance >= 1; distance /= 2) {
    for (int r = 0; r < distance; ++r) combineBytes(type, op, x[r].data(), x[r + distance].data());
  }
  return finished(type, op, size, x[0]);
}

}  // namespace trainmover::reference
