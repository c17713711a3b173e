// The loops themselves, compiled once for each kind of CPU.
//
// Nothing here, in reduce_loop.h or in half.h may have a name that the linker sees, and no function
// of the standard library may be called: the linker keeps one copy of an inline function, which may
// be the one of these objects that an older CPU cannot run. tests/unit/test_core.py checks the
// objects.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/math/half.h"
#include "core/math/loops.h"
#include "core/math/reduce_loop.h"

namespace hvd {
namespace {

template <typename T>
T neutral_of(Reduction reduction) {
  using A = Accumulator<T>;
  using Limits = std::numeric_limits<A>;
  constexpr A greatest = Limits::has_infinity ? Limits::infinity() : Limits::max();
  constexpr A least = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  switch (reduction) {
    case Reduction::product:
      return round_to<T>(static_cast<A>(1));
    case Reduction::min:
      return round_to<T>(greatest);
    case Reduction::max:
      return round_to<T>(least);
    default:
      return round_to<T>(static_cast<A>(0));
  }
}

void convert_loop(DType from, const void* in, DType to, void* out, int64_t elements) {
  if (to == DType::float16) return to_half(from, in, static_cast<Float16*>(out), elements);
  if (to == DType::bfloat16) return to_half(from, in, static_cast<BFloat16*>(out), elements);
  if (from == DType::float16) return from_half(static_cast<const Float16*>(in), to, out, elements);
  if (from == DType::bfloat16)
    return from_half(static_cast<const BFloat16*>(in), to, out, elements);
  if (to == DType::float32) {
    for (int64_t i = 0; i < elements; ++i)
      static_cast<float*>(out)[i] = static_cast<float>(static_cast<const double*>(in)[i]);
  } else {
    for (int64_t i = 0; i < elements; ++i)
      static_cast<double*>(out)[i] = static_cast<const float*>(in)[i];
  }
}

void fill_neutral_loop(DType dtype, Reduction reduction, int64_t elements, void* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T neutral = neutral_of<T>(reduction);
    for (int64_t i = 0; i < elements; ++i) static_cast<T*>(out)[i] = neutral;
  });
}

double dot_loop(DType dtype, const void* a, const void* b, int64_t elements) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    double sum = 0;
    for (int64_t i = 0; i < elements; ++i)
      sum += static_cast<double>(static_cast<Accumulator<T>>(x[i])) *
             static_cast<double>(static_cast<Accumulator<T>>(y[i]));
    return sum;
  });
}

void add_weighted_loop(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                       int64_t elements) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* x = static_cast<T*>(a);
    const T* y = static_cast<const T*>(b);
    for (int64_t i = 0; i < elements; ++i) {
      const double sum = weight_a * static_cast<double>(static_cast<Accumulator<T>>(x[i])) +
                         weight_b * static_cast<double>(static_cast<Accumulator<T>>(y[i]));
      x[i] = round_to<T>(static_cast<Accumulator<T>>(sum));
    }
  });
}

#if defined(__SSE2__)
// Less takes longer past the caches than through them.
constexpr int64_t kLeastPastCaches = 2048;

constexpr int64_t kLine = 64;  // only whole lines can pass the caches

// Whole lines, to the start of a line.
void send_lines(const char* from, int64_t bytes, char* to) {
#if defined(__AVX2__)
  using Vector = __m256i;
  const auto load = [](const Vector* at) { return _mm256_loadu_si256(at); };
  const auto store = [](Vector* at, Vector value) { _mm256_stream_si256(at, value); };
#else
  using Vector = __m128i;
  const auto load = [](const Vector* at) { return _mm_loadu_si128(at); };
  const auto store = [](Vector* at, Vector value) { _mm_stream_si128(at, value); };
#endif
  constexpr int kVectors = kLine / sizeof(Vector);
  for (int64_t at = 0; at < bytes; at += kLine) {
    const auto* source = reinterpret_cast<const Vector*>(from + at);
    auto* target = reinterpret_cast<Vector*>(to + at);
    for (int i = 0; i < kVectors; ++i) store(target + i, load(source + i));
  }
  _mm_sfence();
}
#endif

void copy_nontemporal_loop(const void* from, int64_t bytes, void* to) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
#if defined(__SSE2__)
  if (bytes >= kLeastPastCaches) {
    const int64_t head = -reinterpret_cast<intptr_t>(target) & (kLine - 1);
    const int64_t lines = (bytes - head) / kLine * kLine;
    std::memcpy(target, source, head);
    send_lines(source + head, lines, target + head);
    source += head + lines;
    target += head + lines;
    bytes -= head + lines;
  }
#endif
  std::memcpy(target, source, bytes);
}

Loops loops_of(const char* kind) {
  return {kind,     reduce_loop,       convert_loop,         fill_neutral_loop,
          dot_loop, add_weighted_loop, copy_nontemporal_loop};
}

}  // namespace
}  // namespace hvd
