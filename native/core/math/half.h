// float16 and bfloat16 as the loops see them: stored in 16 bits, computed with in float32. Part of
// loops_body.h, whose rules apply.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/base/dtype.h"

namespace hvd {
namespace {

// Elements per inner loop: three float32 blocks of it stay in the first-level cache.
constexpr int64_t kBlock = 1024;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// IEEE 754 binary16. Without branches, so that compilers make vectors of it; a nan keeps the upper
// bits of its payload and becomes a quiet one, as F16C does it.
struct Float16 {
  uint16_t bits;

  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    const uint32_t quiet = magnitude > 0x7c00 ? 0x400000 : 0;
    const uint32_t special = 0x7f800000 | quiet | magnitude << 13;  // inf, nan
    const uint32_t normal = (magnitude << 13) + 0x38000000;  // the exponents' biases differ by 112
    // Added to 0.5, a subnormal is in the last bits of the mantissa.
    const uint32_t subnormal = bits_of(float_of(magnitude | 0x3f000000) - 0.5f);
    return float_of(sign | (magnitude >= 0x7c00 ? special
                            : magnitude < 0x400 ? subnormal
                                                : normal));
  }

  static Float16 from(float value) {
    const uint32_t word = bits_of(value);
    const uint32_t sign = word >> 16 & 0x8000;
    const uint32_t magnitude = word & 0x7fffffff;
    const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    // Adding 0.5 lets the FPU round at the right bit.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t odd = magnitude >> 13 & 1;  // ties go to even
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + odd) >> 13;
    return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000    ? nan
                                          : magnitude >= 0x477ff000 ? 0x7c00  // beyond 65504
                                          : magnitude < 0x38800000  ? subnormal
                                                                    : normal))};
  }
};

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }

  static BFloat16 from(float value) {
    const uint32_t word = bits_of(value);
    const uint32_t odd = word >> 16 & 1;
    return {static_cast<uint16_t>((word & 0x7fffffff) > 0x7f800000 ? word >> 16 | 0x40  // nan
                                                                   : (word + 0x7fff + odd) >> 16)};
  }
};

template <typename T>
constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// In which type T is accumulated.
template <typename T>
using Accumulator = std::conditional_t<is_half<T>, float, T>;

template <typename T>
T round_to(Accumulator<T> value) {
  if constexpr (is_half<T>) {
    return T::from(value);
  } else {
    return value;
  }
}

template <typename T>
void widen(const T* in, int64_t n, float* out) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
    }
  }
#endif
  for (; i < n; ++i) out[i] = in[i];
}

template <typename T>
void narrow(const float* in, int64_t n, T* out) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bits);
    }
  }
#endif
  for (; i < n; ++i) out[i] = T::from(in[i]);
}

// To float32, so that rounding that once more gives what rounding the double at once would give:
// where float32 is not exact, its last bit is odd, so that it is no tie of a half (Boldo and
// Melquiond, 2008, https://doi.org/10.1109/TC.2007.70819).
float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const double magnitude = value < 0 ? -value : value, got = back < 0 ? -back : back;
  const uint32_t truncated = bits_of(nearest) - (got > magnitude ? 1 : 0);
  return float_of(truncated | (back != value ? 1 : 0));
}

template <typename Half>
void to_half(DType from, const void* in, Half* out, int64_t elements) {
  if (from == DType::float32) return narrow(static_cast<const float*>(in), elements, out);
  const double* source = static_cast<const double*>(in);
  float block[kBlock];
  for (int64_t start = 0; start < elements; start += kBlock) {
    const int64_t n = elements - start < kBlock ? elements - start : kBlock;
    for (int64_t i = 0; i < n; ++i) block[i] = round_to_odd(source[start + i]);
    narrow(block, n, out + start);
  }
}

template <typename Half>
void from_half(const Half* in, DType to, void* out, int64_t elements) {
  if (to == DType::float32) return widen(in, elements, static_cast<float*>(out));
  for (int64_t i = 0; i < elements; ++i)
    static_cast<double*>(out)[i] = static_cast<double>(static_cast<float>(in[i]));
}

}  // namespace
}  // namespace hvd
