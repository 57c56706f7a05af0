// The loops for any processor: vectors of 16 bytes, which every one has (or the compiler takes apart), and fp16 by
// arithmetic on bits. Called by kernels.cc.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernel_set.h"

namespace trainmover {
namespace baseline {
namespace {

constexpr std::size_t kVectorBytes = 16;
#include "reduce/vector_kernels.h"

/// fp16 as F16C does it, bit for bit: exact one way, to nearest even the other; NaNs keep the upper bits of their
/// payload and become quiet. All lanes compute all cases; no fp32 subnormals occur, so flushing them changes nothing.
struct Float16Codec {
  using Accumulator = float;
  using Bits = VectorOf<std::uint32_t>;
  using Floats = VectorOf<float>;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(float);

  static inline Floats load(const unsigned char* from) {
    HalfVector half;
    std::memcpy(&half, from, sizeof half);
    const Bits bits = __builtin_convertvector(half, Bits);
    const Bits magnitude = (bits & 0x7fff) << 13;
    const Bits exponent_shift = Bits{} + (std::uint32_t{127 - 15} << 23);
    const Bits normal = magnitude + exponent_shift;
    const Bits special = (magnitude + 2 * exponent_shift) | (magnitude > 0x0f800000 ? Bits{} + 0x400000 : Bits{});
    // As if the hidden bit were set, then taken away again.
    const Bits hidden = Bits{} + (std::uint32_t{127 - 14} << 23);
    const Bits subnormal = (Bits)((Floats)(magnitude + hidden) - (Floats)hidden);
    const Bits finite = magnitude < 0x00800000 ? subnormal : normal;
    return (Floats)((magnitude >= 0x0f800000 ? special : finite) | (bits & 0x8000) << 16);
  }

  static inline void store(unsigned char* to, Floats vector) {
    const Bits all = (Bits)vector;
    const Bits magnitude = all & 0x7fffffff;
    const Bits odd = magnitude >> 13 & 1;
    const Bits normal = (magnitude - (std::uint32_t{127 - 15} << 23) + 0xfff + odd) >> 13;
    // The last bit of 0.5 weighs what the last bit of an fp16 subnormal does: the addition rounds.
    const Bits half_one = Bits{} + 0x3f000000;
    const Bits subnormal = (Bits)((Floats)magnitude + (Floats)half_one) - half_one;
    const Bits nan = (magnitude >> 13 & 0x3ff) | 0x7e00;
    const Bits special = magnitude > 0x7f800000 ? nan : Bits{} + 0x7c00;
    const Bits finite = magnitude < 0x38800000 ? subnormal : normal;
    const Bits result = (magnitude >= 0x47800000 ? special : finite) | (all >> 16 & 0x8000);
    const HalfVector half = __builtin_convertvector(result, HalfVector);
    std::memcpy(to, &half, sizeof half);
  }
};

struct InstructionSet {
  using Float16Codec = baseline::Float16Codec;
  static inline VectorOf<std::uint32_t> wordsOf(HalfVector halves) {
    return __builtin_convertvector(halves, VectorOf<std::uint32_t>);
  }
  static inline HalfVector halvesOf(VectorOf<std::uint32_t> words) {
    return __builtin_convertvector(words, HalfVector);
  }
};

}  // namespace
}  // namespace baseline

const KernelSet& baselineKernels() {
  static const KernelSet set = {&baseline::kernelsOfOp<baseline::InstructionSet>,
                                &baseline::kernelsOfType<baseline::InstructionSet>};
  return set;
}

}  // namespace trainmover
