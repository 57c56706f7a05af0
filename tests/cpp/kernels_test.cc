// reduce/: every type, operation, order and group size against reduction_reference.h, on both sets of loops, on
// unaligned memory, bit for bit.
#include "reduce/kernels.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "reduce/kernel_set.h"
#include "reduction_reference.h"

namespace {

using namespace trainmover;             // NOLINT: a test of one namespace
using namespace trainmover::reference;  // NOLINT

constexpr DataType kTypes[] = {DataType::kInt8,   DataType::kUInt8,   DataType::kInt16,    DataType::kUInt16,
                               DataType::kInt32,  DataType::kUInt32,  DataType::kInt64,    DataType::kUInt64,
                               DataType::kBool,   DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32,
                               DataType::kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBitAnd,  ReduceOp::kBitOr,   ReduceOp::kBitXor};

std::vector<const KernelSet*> kernelSets() {
  std::vector<const KernelSet*> sets = {&baselineKernels()};
  if (avx2Kernels() != nullptr) sets.push_back(avx2Kernels());
  return sets;
}

/// Elements that hurt: NaNs of two kinds, infinities, zeros of both signs, subnormals, extremes, else random bits.
void fill(DataType type, std::mt19937_64& random, std::uint8_t* to, std::size_t count) {
  static const std::uint32_t kFloats[] = {0x7fc00000, 0xffc12000, 0x7f800000, 0xff800000, 0x00000000,
                                          0x80000000, 0x00000001, 0x807fffff, 0x7f7fffff, 0x3f800000};
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = random();
    std::uint8_t* const at = to + i * elementBytes(type);
    const bool special = bits % 7 == 0;
    const float moderate = static_cast<float>(static_cast<std::int64_t>(bits)) * 0x1p-60F;
    const float value = special ? floatOf(kFloats[bits / 7 % 10]) : moderate;
    if (type == DataType::kFloat64) {
      const double wide = value;
      std::memcpy(at, &wide, sizeof wide);
    } else if (type == DataType::kFloat32) {
      std::memcpy(at, &value, sizeof value);
    } else if (isHalf(type)) {
      const std::uint16_t half = bits % 5 == 0 ? static_cast<std::uint16_t>(bits >> 40) : narrowed(type, value);
      std::memcpy(at, &half, sizeof half);
    } else if (type == DataType::kBool) {
      *at = bits % 3 == 0 ? static_cast<std::uint8_t>(bits >> 20) : 0;  // any byte but 0 is true
    } else {
      std::memcpy(at, &bits, elementBytes(type));
    }
  }
}

/// `size` vectors of `count` elements, each at an odd address, with guard bytes round it.
struct Inputs {
  static constexpr std::size_t kOffset = 1;
  std::vector<Bytes> memory;
  std::vector<const void*> pointers;

  Inputs(DataType type, int size, std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int r = 0; r < size; ++r) {
      memory.emplace_back(count * elementBytes(type) + 2 * kOffset, 0xa5);
      fill(type, random, memory.back().data() + kOffset, count);
    }
    for (const Bytes& bytes : memory) pointers.push_back(bytes.data() + kOffset);
  }

  Bytes expected(ReductionOrder order, int owner, DataType type, ReduceOp op, std::size_t count) const {
    Bytes result;
    const std::size_t width = elementBytes(type);
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<Bytes> elements;
      for (const void* pointer : pointers) {
        const auto* at = static_cast<const std::uint8_t*>(pointer) + i * width;
        elements.emplace_back(at, at + width);
      }
      const Bytes element = referenceOf(order, owner, type, op, elements);
      result.insert(result.end(), element.begin(), element.end());
    }
    return result;
  }
};

std::string describe(DataType type, ReduceOp op, ReductionOrder order, int size, std::size_t count, std::size_t at) {
  return "type " + std::to_string(static_cast<int>(type)) + " op " + std::to_string(static_cast<int>(op)) +
         (order == ReductionOrder::kTree ? " tree" : " ring") + " size " + std::to_string(size) + " count " +
         std::to_string(count) + ": first difference at byte " + std::to_string(at);
}

void checkBytes(const Bytes& expected, const std::uint8_t* found, const std::string& name) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] != found[i]) check::fail(__FILE__, __LINE__, name + std::to_string(i));
  }
}

void checkReduceAll(DataType type, ReduceOp op, ReductionOrder order, int size, int owner, std::size_t count) {
  const Inputs inputs(type, size, count, 7 + static_cast<std::uint64_t>(size) * 31 + count);
  const Bytes expected = inputs.expected(order, owner, type, op, count);
  for (const KernelSet* kernels : kernelSets()) {
    Bytes out(expected.size() + 2, 0x5a);
    reduceAll(*kernels, order, owner, inputs.pointers.data(), size, out.data() + 1, count, type, op);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] != out[i + 1]) {
        check::fail(__FILE__, __LINE__, describe(type, op, order, size, count, i));
      }
    }
    CHECK_EQ(out.front(), 0x5a);
    CHECK_EQ(out.back(), 0x5a);
  }
}

TEST(reduce_all_equals_the_reference_for_every_type_operation_order_and_size) {
  for (const DataType type : kTypes) {
    for (const ReduceOp op : kOps) {
      if (!reducible(type, op)) continue;
      for (const int size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 23}) {
        checkReduceAll(type, op, ReductionOrder::kTree, size, 0, 37);
        checkReduceAll(type, op, ReductionOrder::kRing, size, size / 2, 37);
      }
    }
  }
}

TEST(reduce_all_takes_every_owner_and_count) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kInt8}) {
    for (int owner = 0; owner < 8; ++owner) checkReduceAll(type, ReduceOp::kSum, ReductionOrder::kRing, 8, owner, 20);
    // Round the widths of vectors and of blocks.
    for (const std::size_t count : {0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1025, 2047, 2049}) {
      for (const int size : {2, 4, 6}) {
        checkReduceAll(type, ReduceOp::kSum, ReductionOrder::kTree, size, 0, count);
        checkReduceAll(type, ReduceOp::kSum, ReductionOrder::kRing, size, 1, count);
      }
    }
  }
}

TEST(reduce_all_may_write_over_any_one_input) {
  constexpr std::size_t kCount = 520;
  for (const DataType type : {DataType::kFloat32, DataType::kFloat16, DataType::kInt64}) {
    for (const ReductionOrder order : {ReductionOrder::kTree, ReductionOrder::kRing}) {
      for (const int size : {1, 2, 3, 4, 7, 8, 9, 16}) {
        for (const KernelSet* kernels : kernelSets()) {
          for (int target = 0; target < size; target += 1 + size / 4) {
            Inputs inputs(type, size, kCount, 5);
            const Bytes expected = inputs.expected(order, 0, type, ReduceOp::kSum, kCount);
            std::uint8_t* const out = inputs.memory[target].data() + Inputs::kOffset;
            reduceAll(*kernels, order, 0, inputs.pointers.data(), size, out, kCount, type, ReduceOp::kSum);
            checkBytes(expected, out, describe(type, ReduceOp::kSum, order, size, kCount, 0) + " in place, byte ");
          }
        }
      }
    }
  }
}

TEST(accumulate_equals_the_reference_in_both_forms_and_orders) {
  constexpr std::size_t kCount = 45;
  for (const DataType type : kTypes) {
    for (const ReduceOp op : kOps) {
      if (!reducible(type, op)) continue;
      for (const KernelSet* kernels : kernelSets()) {
        for (const bool accumulator_first : {true, false}) {
          for (const Form form : {Form::kElement, Form::kAccumulator}) {
            const Inputs inputs(type, 2, kCount, 99);
            const std::size_t wide = accumulatorBytes(type);
            Bytes accumulator(kCount * wide + 1);
            Bytes source(kCount * wide + 1);
            Bytes expected;
            for (std::size_t i = 0; i < kCount; ++i) {
              const Bytes a = accumulatorOf(type, inputs.memory[0].data() + 1 + i * elementBytes(type));
              const Bytes b = accumulatorOf(type, inputs.memory[1].data() + 1 + i * elementBytes(type));
              std::memcpy(accumulator.data() + 1 + i * wide, a.data(), wide);
              std::memcpy(source.data() + 1 + i * wide, b.data(), wide);
              Bytes result = accumulator_first ? a : b;
              combineBytes(type, op, result.data(), (accumulator_first ? b : a).data());
              expected.insert(expected.end(), result.begin(), result.end());
            }
            const void* from = form == Form::kElement ? inputs.pointers[1] : source.data() + 1;
            accumulate(*kernels, accumulator.data() + 1, from, form, accumulator_first, kCount, type, op);
            checkBytes(expected, accumulator.data() + 1,
                       describe(type, op, ReductionOrder::kTree, 2, kCount, 0) + ", ");
          }
        }
      }
    }
  }
}

TEST(widening_every_16_bit_number_is_exact) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  for (const DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    for (const KernelSet* kernels : kernelSets()) {
      std::vector<float> wide(halves.size());
      widen(*kernels, wide.data(), halves.data(), halves.size(), type);
      for (std::size_t i = 0; i < halves.size(); ++i) CHECK_EQ(bitsOf(wide[i]), bitsOf(widened(type, halves[i])));
    }
  }
}

/// Round every 16-bit number: itself, what lies halfway to the next, and their neighbours; and random bits.
std::vector<float> hardToRound(DataType type) {
  std::vector<float> values;
  const std::uint32_t halfway = type == DataType::kFloat16 ? 0x1000 : 0x8000;
  for (std::uint32_t half = 0; half < 65536; half += 3) {
    const std::uint32_t bits = bitsOf(widened(type, static_cast<std::uint16_t>(half)));
    for (const std::uint32_t offset : {0U, 1U, halfway - 1, halfway, halfway + 1})
      values.push_back(floatOf(bits + offset));
  }
  // Halfway between subnormals of fp16, and round the smallest.
  for (int units = 0; units < 2100; ++units) {
    const float value = std::ldexp(static_cast<float>(units), -25);
    for (const float near : {value, std::nextafter(value, 1.0F), std::nextafter(value, 0.0F)}) values.push_back(-near);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) values.push_back(floatOf(static_cast<std::uint32_t>(random())));
  return values;
}

TEST(finishing_16_bit_numbers_rounds_to_nearest_even) {
  for (const DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    const std::vector<float> values = hardToRound(type);
    for (const KernelSet* kernels : kernelSets()) {
      std::vector<std::uint16_t> halves(values.size());
      finish(*kernels, halves.data(), values.data(), values.size(), type, ReduceOp::kSum, 2);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (halves[i] == narrowed(type, values[i])) continue;
        check::fail(__FILE__, __LINE__,
                    "fp32 bits " + std::to_string(bitsOf(values[i])) + " rounded to " + std::to_string(halves[i]) +
                        ", expected " + std::to_string(narrowed(type, values[i])));
      }
    }
  }
}

TEST(finish_works_in_place_and_divides) {
  constexpr std::size_t kCount = 1003;
  for (const DataType type : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32, DataType::kFloat64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      for (const KernelSet* kernels : kernelSets()) {
        const Inputs inputs(type, 1, kCount, 11);
        Bytes memory(kCount * accumulatorBytes(type) + 1);
        Bytes expected;
        for (std::size_t i = 0; i < kCount; ++i) {
          const Bytes wide = accumulatorOf(type, inputs.memory[0].data() + 1 + i * elementBytes(type));
          std::memcpy(memory.data() + 1 + i * wide.size(), wide.data(), wide.size());
          const Bytes element = finished(type, op, 3, wide);
          expected.insert(expected.end(), element.begin(), element.end());
        }
        finish(*kernels, memory.data() + 1, memory.data() + 1, kCount, type, op, 3);
        checkBytes(expected, memory.data() + 1, "in place, byte ");
      }
    }
  }
}

TEST(plain_types_are_copied_by_widen_and_finish) {
  const std::vector<std::int32_t> values = {1, -2, 3};
  std::vector<std::int32_t> out(3);
  widen(out.data(), values.data(), 3, DataType::kInt32);
  CHECK(out == values);
  out.assign(3, 0);
  finish(out.data(), values.data(), 3, DataType::kInt32, ReduceOp::kSum, 2);
  CHECK(out == values);
  widen(nullptr, nullptr, 0, DataType::kInt32);
  finish(nullptr, nullptr, 0, DataType::kInt32, ReduceOp::kSum, 2);
}

TEST(nan_goes_through_every_float_operation) {
  const float nan = floatOf(0xffc00123);
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
    for (int position = 0; position < 4; ++position) {
      std::vector<float> values = {1, -2, 3, 4};
      values[position] = nan;
      const void* inputs[] = {&values[0], &values[1], &values[2], &values[3]};
      float out = 0;
      reduceAll(ReductionOrder::kTree, 0, inputs, 4, &out, 1, DataType::kFloat32, op);
      CHECK_EQ(bitsOf(out), 0x7fc00000U);
    }
  }
}

TEST(of_equal_zeros_the_first_operand_stays) {
  const float zeros[] = {0.0F, -0.0F};
  for (const KernelSet* kernels : kernelSets()) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (int first = 0; first < 2; ++first) {
        float accumulator = zeros[first];
        accumulate(*kernels, &accumulator, &zeros[1 - first], Form::kElement, true, 1, DataType::kFloat32, op);
        CHECK_EQ(bitsOf(accumulator), bitsOf(zeros[first]));
        accumulate(*kernels, &accumulator, &zeros[1 - first], Form::kElement, false, 1, DataType::kFloat32, op);
        CHECK_EQ(bitsOf(accumulator), bitsOf(zeros[1 - first]));
      }
    }
  }
}

TEST(only_sensible_pairs_are_reducible) {
  CHECK(reducible(DataType::kFloat16, ReduceOp::kAverage));
  CHECK(!reducible(DataType::kInt32, ReduceOp::kAverage));
  CHECK(!reducible(DataType::kBool, ReduceOp::kAverage));
  CHECK(!reducible(DataType::kFloat64, ReduceOp::kBitXor));
  CHECK(reducible(DataType::kBool, ReduceOp::kBitXor));
  CHECK(!reducible(DataType::kFloat32, static_cast<ReduceOp>(99)));
  for (const DataType type : kTypes) {
    for (const ReduceOp op : kOps) {
      for (const KernelSet* kernels : kernelSets()) {
        CHECK_EQ(reducible(type, op), kernels->of_op(type, op).pair[1][1] != nullptr);
      }
      if (reducible(type, op)) continue;
      std::uint64_t memory = 0;
      const void* inputs[] = {&memory, &memory};
      CHECK_THROWS(reduceAll(ReductionOrder::kTree, 0, inputs, 2, &memory, 1, type, op), std::invalid_argument);
      CHECK_THROWS(accumulate(&memory, &memory, Form::kElement, true, 1, type, op), std::invalid_argument);
    }
  }
}

TEST(impossible_sizes_and_owners_are_refused) {
  float value = 1;
  const void* inputs[] = {&value, &value};
  const auto call = [&](ReductionOrder order, int owner, int size) {
    reduceAll(order, owner, inputs, size, &value, 1, DataType::kFloat32, ReduceOp::kSum);
  };
  CHECK_THROWS(call(ReductionOrder::kTree, 0, 0), std::invalid_argument);
  CHECK_THROWS(call(ReductionOrder::kRing, 2, 2), std::invalid_argument);
  CHECK_THROWS(call(ReductionOrder::kRing, -1, 2), std::invalid_argument);
}

}  // namespace
