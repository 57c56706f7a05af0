// The loops themselves, on the compiler's vector types. Included by kernels_baseline.cc and by kernels_avx2.cc, each
// time in another namespace and for another instruction set, after kVectorBytes; hence no include guard, and no
// includes: the standard headers must not be compiled for the instruction set of one of the two.
//
// Memory is only ever touched by memcpy of whole vectors, so any alignment will do. The last few elements pass through
// a padded vector, so that they take the same path as all others.

#define TRAINMOVER_INLINE inline __attribute__((always_inline))

template <typename T>
struct VectorType {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using VectorOf = typename VectorType<T>::type;

/// As many 16-bit numbers as a vector has floats.
typedef std::uint16_t HalfVector __attribute__((vector_size(kVectorBytes / 2)));

/// Numbers that are their own accumulators.
template <typename T>
struct PlainCodec {
  using Accumulator = T;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(T);
  static TRAINMOVER_INLINE VectorOf<T> load(const unsigned char* from) {
    VectorOf<T> vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
  }
  static TRAINMOVER_INLINE void store(unsigned char* to, VectorOf<T> vector) {
    std::memcpy(to, &vector, sizeof vector);
  }
};

/// bf16: the upper half of an fp32. Rounds to nearest even; NaNs stay NaNs, made quiet. InstructionSet converts between
/// 16-bit and 32-bit lanes.
template <typename InstructionSet>
struct BFloat16Codec {
  using Accumulator = float;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
  static TRAINMOVER_INLINE VectorOf<float> load(const unsigned char* from) {
    HalfVector half;
    std::memcpy(&half, from, sizeof half);
    return (VectorOf<float>)(InstructionSet::wordsOf(half) << 16);
  }
  static TRAINMOVER_INLINE void store(unsigned char* to, VectorOf<float> vector) {
    const auto bits = (VectorOf<std::uint32_t>)vector;
    const VectorOf<std::uint32_t> rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const VectorOf<std::uint32_t> quiet = bits >> 16 | 0x40;
    const HalfVector half = InstructionSet::halvesOf(vector == vector ? rounded : quiet);
    std::memcpy(to, &half, sizeof half);
  }
};

/// Every NaN that an operation yields is replaced by this one: which operand's NaN a processor hands on depends on the
/// order in which the compiler happened to place them, and its own differ in sign.
template <typename T>
TRAINMOVER_INLINE VectorOf<T> settled(VectorOf<T> vector) {
  if constexpr (std::is_floating_point_v<T>) {
    return vector == vector ? vector : VectorOf<T>{} + std::numeric_limits<T>::quiet_NaN();
  } else {
    return vector;
  }
}

struct Sum {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return a * b;
  }
};
// The comparison is false when `a` is a NaN, which keeps it; for integers the second line changes nothing.
struct Min {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    const V smaller = b < a ? b : a;
    return b == b ? smaller : b;
  }
};
struct Max {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    const V larger = b > a ? b : a;
    return b == b ? larger : b;
  }
};
struct BitAnd {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return a & b;
  }
};
struct BitOr {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return a | b;
  }
};
struct BitXor {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return a ^ b;
  }
};
/// Bools: any byte but 0 is true, results are 0 or 1.
template <typename Op>
struct Logical {
  template <typename V>
  static TRAINMOVER_INLINE V of(V a, V b) {
    return Op::of((V)(a != 0), (V)(b != 0)) & 1;
  }
};

/// out = op of `a` read by A and `b` read by B.
template <typename A, typename B, typename Op>
void combinePair(void* out, const void* a, const void* b, std::size_t count) {
  using T = typename A::Accumulator;
  constexpr std::size_t kLanes = A::kLanes;
  auto* to = static_cast<unsigned char*>(out);
  const auto* from_a = static_cast<const unsigned char*>(a);
  const auto* from_b = static_cast<const unsigned char*>(b);
  std::size_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) {
    const VectorOf<T> value = Op::of(A::load(from_a + i * A::kElementBytes), B::load(from_b + i * B::kElementBytes));
    PlainCodec<T>::store(to + i * sizeof(T), settled<T>(value));
  }
  if (i == count) return;
  unsigned char rest_a[kLanes * A::kElementBytes] = {};
  unsigned char rest_b[kLanes * B::kElementBytes] = {};
  unsigned char rest_out[kVectorBytes];
  std::memcpy(rest_a, from_a + i * A::kElementBytes, (count - i) * A::kElementBytes);
  std::memcpy(rest_b, from_b + i * B::kElementBytes, (count - i) * B::kElementBytes);
  PlainCodec<T>::store(rest_out, settled<T>(Op::of(A::load(rest_a), B::load(rest_b))));
  std::memcpy(to + i * sizeof(T), rest_out, (count - i) * sizeof(T));
}

/// The vectors at `offset` of N inputs, combined in one order. The loops have constant bounds and are unrolled.
template <typename Codec, typename Op, int N, bool kTree>
TRAINMOVER_INLINE VectorOf<typename Codec::Accumulator> combined(const unsigned char* const* inputs,
                                                                 std::size_t offset) {
  using V = VectorOf<typename Codec::Accumulator>;
  if constexpr (N == 1) {
    return Codec::load(inputs[0] + offset);
  } else if constexpr (kTree) {
    // Ranks r and r + N/2 are combined first: evens and odds are whole trees until the last step.
    const unsigned char* even[N / 2];
    const unsigned char* odd[N / 2];
    for (int r = 0; r < N / 2; ++r) {
      even[r] = inputs[2 * r];
      odd[r] = inputs[2 * r + 1];
    }
    return Op::template of<V>(combined<Codec, Op, N / 2, true>(even, offset),
                              combined<Codec, Op, N / 2, true>(odd, offset));
  } else {
    return Op::template of<V>(combined<Codec, Op, N - 1, false>(inputs, offset), Codec::load(inputs[N - 1] + offset));
  }
}

template <typename Codec, typename Op, int N, bool kTree>
void combineFused(void* out, const void* const* inputs, std::size_t count) {
  using T = typename Codec::Accumulator;
  constexpr std::size_t kLanes = Codec::kLanes;
  auto* to = static_cast<unsigned char*>(out);
  const unsigned char* from[N];
  for (int r = 0; r < N; ++r) from[r] = static_cast<const unsigned char*>(inputs[r]);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const VectorOf<T> value = combined<Codec, Op, N, kTree>(from, i * Codec::kElementBytes);
    PlainCodec<T>::store(to + i * sizeof(T), settled<T>(value));
  }
  if (i == count) return;
  unsigned char rest[N][kLanes * Codec::kElementBytes] = {};
  unsigned char rest_out[kVectorBytes];
  const unsigned char* rest_from[N];
  for (int r = 0; r < N; ++r) {
    std::memcpy(rest[r], from[r] + i * Codec::kElementBytes, (count - i) * Codec::kElementBytes);
    rest_from[r] = rest[r];
  }
  PlainCodec<T>::store(rest_out, settled<T>(combined<Codec, Op, N, kTree>(rest_from, 0)));
  std::memcpy(to + i * sizeof(T), rest_out, (count - i) * sizeof(T));
}

/// Reads with From, divides if asked to, writes with To. Never writes ahead of what it has read, so that `out` may
/// begin where `in` does if its elements are not larger.
template <typename From, typename To, bool kDivide>
void convert(void* out, const void* in, std::size_t count, int divisor) {
  using T = typename From::Accumulator;
  constexpr std::size_t kLanes = From::kLanes;
  auto* to = static_cast<unsigned char*>(out);
  const auto* from = static_cast<const unsigned char*>(in);
  const auto divided = [divisor](VectorOf<T> vector) __attribute__((always_inline)) {
    if constexpr (kDivide) return vector / static_cast<T>(divisor);
    static_cast<void>(divisor);
    return vector;
  };
  std::size_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= count; i += kLanes) {
    To::store(to + i * To::kElementBytes, divided(From::load(from + i * From::kElementBytes)));
  }
  if (i == count) return;
  unsigned char rest[kLanes * From::kElementBytes] = {};
  unsigned char rest_out[kLanes * To::kElementBytes];
  std::memcpy(rest, from + i * From::kElementBytes, (count - i) * From::kElementBytes);
  To::store(rest_out, divided(From::load(rest)));
  std::memcpy(to + i * To::kElementBytes, rest_out, (count - i) * To::kElementBytes);
}

template <typename Codec, typename Op>
OpKernels pairsOf() {
  using Wide = PlainCodec<typename Codec::Accumulator>;
  OpKernels kernels;
  kernels.pair[0][0] = &combinePair<Codec, Codec, Op>;
  kernels.pair[0][1] = &combinePair<Codec, Wide, Op>;
  kernels.pair[1][0] = &combinePair<Wide, Codec, Op>;
  kernels.pair[1][1] = &combinePair<Wide, Wide, Op>;
  return kernels;
}

template <typename Codec>
OpKernels floatKernels(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage: {
      OpKernels kernels = pairsOf<Codec, Sum>();
      kernels.tree4 = &combineFused<Codec, Sum, 4, true>;
      kernels.tree8 = &combineFused<Codec, Sum, 8, true>;
      kernels.ring4 = &combineFused<Codec, Sum, 4, false>;
      kernels.ring8 = &combineFused<Codec, Sum, 8, false>;
      return kernels;
    }
    case ReduceOp::kProduct:
      return pairsOf<Codec, Product>();
    case ReduceOp::kMin:
      return pairsOf<Codec, Min>();
    case ReduceOp::kMax:
      return pairsOf<Codec, Max>();
    default:
      return {};
  }
}

/// Integers wrap: all but comparisons work on the unsigned type.
template <typename T>
OpKernels integerKernels(ReduceOp op) {
  using Unsigned = PlainCodec<std::make_unsigned_t<T>>;
  switch (op) {
    case ReduceOp::kSum:
      return pairsOf<Unsigned, Sum>();
    case ReduceOp::kProduct:
      return pairsOf<Unsigned, Product>();
    case ReduceOp::kMin:
      return pairsOf<PlainCodec<T>, Min>();
    case ReduceOp::kMax:
      return pairsOf<PlainCodec<T>, Max>();
    case ReduceOp::kBitAnd:
      return pairsOf<Unsigned, BitAnd>();
    case ReduceOp::kBitOr:
      return pairsOf<Unsigned, BitOr>();
    case ReduceOp::kBitXor:
      return pairsOf<Unsigned, BitXor>();
    case ReduceOp::kAverage:
      return {};
  }
  return {};
}

inline OpKernels boolKernels(ReduceOp op) {
  using Byte = PlainCodec<std::uint8_t>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return pairsOf<Byte, Logical<BitOr>>();
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return pairsOf<Byte, Logical<BitAnd>>();
    case ReduceOp::kBitXor:
      return pairsOf<Byte, Logical<BitXor>>();
    case ReduceOp::kAverage:
      return {};
  }
  return {};
}

template <typename InstructionSet>
OpKernels kernelsOfOp(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::kInt8:
      return integerKernels<std::int8_t>(op);
    case DataType::kUInt8:
      return integerKernels<std::uint8_t>(op);
    case DataType::kInt16:
      return integerKernels<std::int16_t>(op);
    case DataType::kUInt16:
      return integerKernels<std::uint16_t>(op);
    case DataType::kInt32:
      return integerKernels<std::int32_t>(op);
    case DataType::kUInt32:
      return integerKernels<std::uint32_t>(op);
    case DataType::kInt64:
      return integerKernels<std::int64_t>(op);
    case DataType::kUInt64:
      return integerKernels<std::uint64_t>(op);
    case DataType::kBool:
      return boolKernels(op);
    case DataType::kFloat16:
      return floatKernels<typename InstructionSet::Float16Codec>(op);
    case DataType::kBFloat16:
      return floatKernels<BFloat16Codec<InstructionSet>>(op);
    case DataType::kFloat32:
      return floatKernels<PlainCodec<float>>(op);
    case DataType::kFloat64:
      return floatKernels<PlainCodec<double>>(op);
  }
  return {};
}

template <typename From, typename To>
void convertOnly(void* out, const void* in, std::size_t count) {
  convert<From, To, false>(out, in, count, 1);
}

template <typename Codec>
TypeKernels conversionsOf() {
  using Wide = PlainCodec<typename Codec::Accumulator>;
  TypeKernels kernels;
  if constexpr (!std::is_same_v<Codec, Wide>) {
    kernels.widen = &convertOnly<Codec, Wide>;
    kernels.finish = &convertOnly<Wide, Codec>;
  }
  kernels.divide_and_finish = &convert<Wide, Codec, true>;
  return kernels;
}

template <typename InstructionSet>
TypeKernels kernelsOfType(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return conversionsOf<typename InstructionSet::Float16Codec>();
    case DataType::kBFloat16:
      return conversionsOf<BFloat16Codec<InstructionSet>>();
    case DataType::kFloat32:
      return conversionsOf<PlainCodec<float>>();
    case DataType::kFloat64:
      return conversionsOf<PlainCodec<double>>();
    default:
      return {};
  }
}

#undef TRAINMOVER_INLINE
