// The loops for x86 processors with AVX2 and F16C: vectors of 32 bytes, fp16 by the processor's own conversions. Called
// by kernels.cc, which asks the processor first. The instruction set is switched on after all headers, so that no
// inline function that other files share is compiled for it.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernel_set.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace trainmover {
namespace avx2 {
namespace {

constexpr std::size_t kVectorBytes = 32;
#include "reduce/vector_kernels.h"

struct Float16Codec {
  using Accumulator = float;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
  static inline VectorOf<float> load(const unsigned char* from) {
    __m128i half;
    std::memcpy(&half, from, sizeof half);
    return (VectorOf<float>)_mm256_cvtph_ps(half);
  }
  static inline void store(unsigned char* to, VectorOf<float> vector) {
    const __m128i half = _mm256_cvtps_ph((__m256)vector, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &half, sizeof half);
  }
};

/// By hand: the compiler takes four instructions to widen where one will do.
struct InstructionSet {
  using Float16Codec = avx2::Float16Codec;
  static inline VectorOf<std::uint32_t> wordsOf(HalfVector halves) {
    return (VectorOf<std::uint32_t>)_mm256_cvtepu16_epi32((__m128i)halves);
  }
  static inline HalfVector halvesOf(VectorOf<std::uint32_t> words) {
    const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
    return (HalfVector)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
  }
};

}  // namespace
}  // namespace avx2
}  // namespace trainmover

#pragma GCC pop_options

namespace trainmover {

const KernelSet* avx2Kernels() {
  static const KernelSet set = {&avx2::kernelsOfOp<avx2::InstructionSet>, &avx2::kernelsOfType<avx2::InstructionSet>};
  static const bool usable = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
  return usable ? &set : nullptr;
}

}  // namespace trainmover

#else

namespace trainmover {

const KernelSet* avx2Kernels() { return nullptr; }

}  // namespace trainmover

#endif
