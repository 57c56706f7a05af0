// The arithmetic of the schedule tests, and what reductions must come to by the letter of reduction_order.h. Its own
// tiny implementation, so that schedules are tested apart from reduce/kernels.cc. Used by schedule_simulation.h and
// schedule_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/types.h"
#include "collectives/reduction_order.h"

namespace trainmover::simulation {

using Bytes = std::vector<unsigned char>;

template <typename T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void store(unsigned char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

struct Float32 {
  using Element = float;
  using Sum = float;
  static Sum widen(Element value) { return value; }
  static Element round(Sum value) { return value; }
  static Sum combine(Sum a, Sum b) { return a + b; }
  static Sum average(Sum value, int size) { return value / static_cast<float>(size); }
};

struct BFloat16 {
  using Element = std::uint16_t;
  using Sum = float;
  static Sum widen(Element value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    return load<float>(reinterpret_cast<const unsigned char*>(&bits));
  }
  /// To nearest even. The tests use finite numbers only.
  static Element round(Sum value) {
    const std::uint32_t bits = load<std::uint32_t>(reinterpret_cast<const unsigned char*>(&value));
    return static_cast<Element>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  static Sum combine(Sum a, Sum b) { return a + b; }
  static Sum average(Sum value, int size) { return value / static_cast<float>(size); }
};

/// Stands for all integers. Its operation is neither commutative nor associative, so that every order but the right one
/// gives another result.
struct OrderProbe {
  using Element = std::uint64_t;
  using Sum = std::uint64_t;
  static Sum widen(Element value) { return value; }
  static Element round(Sum value) { return value; }
  static Sum combine(Sum a, Sum b) { return a * 6364136223846793005U + (b << 17 | b >> 47) + 1; }
  static Sum average(Sum, int) { throw std::logic_error("averages are for floats"); }
};

/// Calls `body` with the arithmetic of `type`: kFloat32, kBFloat16 or kInt64.
template <typename Body>
void withArithmetic(DataType type, Body body) {
  if (type == DataType::kFloat32) return body(Float32{});
  if (type == DataType::kBFloat16) return body(BFloat16{});
  if (type == DataType::kInt64) return body(OrderProbe{});
  throw std::logic_error("no arithmetic for this type in the tests");
}

inline void accumulate(DataType type, unsigned char* target, const unsigned char* source, Form form, bool target_first,
                       std::size_t count) {
  withArithmetic(type, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    using Sum = typename A::Sum;
    for (std::size_t i = 0; i < count; ++i) {
      const Sum own = load<Sum>(target + i * sizeof(Sum));
      const Sum other = form == Form::kAccumulator
                            ? load<Sum>(source + i * sizeof(Sum))
                            : A::widen(load<typename A::Element>(source + i * sizeof(typename A::Element)));
      store(target + i * sizeof(Sum), target_first ? A::combine(own, other) : A::combine(other, own));
    }
  });
}

inline void widen(DataType type, unsigned char* target, const unsigned char* source, std::size_t count) {
  withArithmetic(type, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    for (std::size_t i = 0; i < count; ++i) {
      store(target + i * sizeof(typename A::Sum),
            A::widen(load<typename A::Element>(source + i * sizeof(typename A::Element))));
    }
  });
}

/// Also in place.
inline void finish(DataType type, ReduceOp op, int size, unsigned char* target, const unsigned char* source,
                   std::size_t count) {
  withArithmetic(type, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    for (std::size_t i = 0; i < count; ++i) {
      auto value = load<typename A::Sum>(source + i * sizeof(typename A::Sum));
      if (op == ReduceOp::kAverage) value = A::average(value, size);
      store(target + i * sizeof(typename A::Element), A::round(value));
    }
  });
}

/// a = a (x) b, element by element.
template <typename A>
void combineInto(std::vector<typename A::Sum>& a, const std::vector<typename A::Sum>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = A::combine(a[i], b[i]);
}

/// The contributions x in the order that reduction_order.h gives, literally.
template <typename A>
std::vector<typename A::Sum> combineAll(std::vector<std::vector<typename A::Sum>> x, ReductionOrder order, int owner) {
  const int size = static_cast<int>(x.size());
  const auto at = [&](int rank) -> std::vector<typename A::Sum>& { return x[static_cast<std::size_t>(rank % size)]; };
  if (order == ReductionOrder::kRing) {
    std::vector<typename A::Sum> sum = at(owner + 1);
    for (int i = 2; i <= size; ++i) combineInto<A>(sum, at(owner + i));
    return sum;
  }
  int power = 1;
  while (power * 2 <= size) power *= 2;
  for (int r = 0; r + power < size; ++r) combineInto<A>(at(r), at(r + power));
  for (int d = power / 2; d >= 1; d /= 2) {
    for (int r = 0; r < d; ++r) combineInto<A>(at(r), at(r + d));
  }
  return x[0];
}

/// Elements [slice) of the vectors of all ranks, combined and finished.
inline Bytes expectedReduction(DataType type, ReduceOp op, const std::vector<Bytes>& vectors, ReductionOrder order,
                               int owner, Slice slice) {
  Bytes result((slice.end - slice.begin) * elementBytes(type));
  withArithmetic(type, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    constexpr std::size_t kUnit = sizeof(typename A::Element);
    std::vector<std::vector<typename A::Sum>> x(vectors.size());
    for (std::size_t rank = 0; rank < vectors.size(); ++rank) {
      x[rank].resize(slice.end - slice.begin);
      const unsigned char* from = vectors[rank].data() + slice.begin * kUnit;
      for (typename A::Sum& value : x[rank]) {
        value = A::widen(load<typename A::Element>(from));
        from += kUnit;
      }
    }
    const auto combined = combineAll<A>(std::move(x), order, owner);
    for (std::size_t i = 0; i < combined.size(); ++i) {
      const bool average = op == ReduceOp::kAverage;
      const auto value = average ? A::average(combined[i], static_cast<int>(vectors.size())) : combined[i];
      store(result.data() + i * kUnit, A::round(value));
    }
  });
  return result;
}

}  // namespace trainmover::simulation
