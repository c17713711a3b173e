// The loop that reduces, compiled once for each kind of CPU: see loops_body.h.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "core/math/half.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

// Integers wrap around without undefined behaviour.
template <typename A, typename Combine>
A wrapping(A a, A b, Combine combine) {
  if constexpr (std::is_same_v<A, bool> || !std::is_integral_v<A>) {
    return static_cast<A>(combine(a, b));
  } else {
    using Wide =
        std::conditional_t<(sizeof(A) < sizeof(unsigned)), unsigned, std::make_unsigned_t<A>>;
    return static_cast<A>(combine(static_cast<Wide>(a), static_cast<Wide>(b)));
  }
}

struct Add {
  template <typename A>
  A operator()(A a, A b) const {
    return wrapping(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct Multiply {
  template <typename A>
  A operator()(A a, A b) const {
    return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
};
// A nan wins over any number, whichever rank it comes from.
struct Least {
  template <typename A>
  A operator()(A a, A b) const {
    return b < a || b != b ? b : a;
  }
};
struct Greatest {
  template <typename A>
  A operator()(A a, A b) const {
    return b > a || b != b ? b : a;
  }
};

// Whether a division by it and a multiplication by its reciprocal give the same bits.
bool power_of_two(double divisor) {
  return divisor >= 1 && divisor <= 1 << 30 &&
         divisor == static_cast<double>(static_cast<int64_t>(divisor)) &&
         (static_cast<int64_t>(divisor) & (static_cast<int64_t>(divisor) - 1)) == 0;
}

// Two sources in one pass, which reads them as fast as the other core's cache gives them. `out` may
// be one of them, so that no store is read later.
template <typename T, typename Combine>
void reduce_pair(Combine combine, T factor, const T* a, const T* b, int64_t elements, T* out) {
  if (factor == static_cast<T>(1)) {
#pragma GCC ivdep
    for (int64_t i = 0; i < elements; ++i) out[i] = combine(a[i], b[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < elements; ++i) out[i] = static_cast<T>(combine(a[i], b[i]) * factor);
  }
}

template <typename T, typename Combine>
void reduce_with(Combine combine, const Factors& factors, const void* const* sources, int count,
                 int64_t elements, void* out) {
  using A = Accumulator<T>;
  constexpr bool floating = std::is_floating_point_v<A>;
  const A prescale = static_cast<A>(factors.prescale);
  if constexpr (!is_half<T>) {
    const bool scales = floating && (factors.prescale != 1.0 || factors.postscale != 1.0 ||
                                     !power_of_two(factors.divisor));
    if (count == 2 && !scales)
      return reduce_pair(combine, static_cast<T>(floating ? 1 / factors.divisor : 1),
                         static_cast<const T*>(sources[0]), static_cast<const T*>(sources[1]),
                         elements, static_cast<T*>(out));
  }
  A block[kBlock], first[kBlock], next[kBlock];
  for (int64_t start = 0; start < elements; start += kBlock) {
    const int64_t n = elements - start < kBlock ? elements - start : kBlock;
    // The terms of a source; in `room`, if they are not what it holds.
    const auto terms = [&](int s, A* room) -> const A* {
      const T* source = static_cast<const T*>(sources[s]) + start;
      if constexpr (is_half<T>) {
        widen(source, n, room);
        if (factors.prescale != 1.0) {
          for (int64_t i = 0; i < n; ++i) room[i] *= prescale;
        }
        return room;
      } else {
        if (!floating || factors.prescale == 1.0) return source;
        for (int64_t i = 0; i < n; ++i) room[i] = static_cast<A>(source[i] * prescale);
        return room;
      }
    };
    const A* left = terms(0, first);
    for (int s = 1; s < count; ++s) {
      const A* right = terms(s, next);
      for (int64_t i = 0; i < n; ++i) block[i] = combine(left[i], right[i]);
      left = block;
    }
    if constexpr (floating) {
      // A division, not a multiplication by the reciprocal: exact where the quotient is.
      if (factors.divisor != 1.0) {
        for (int64_t i = 0; i < n; ++i) block[i] = left[i] / static_cast<A>(factors.divisor);
        left = block;
      }
      if (factors.postscale != 1.0) {
        for (int64_t i = 0; i < n; ++i) block[i] = left[i] * static_cast<A>(factors.postscale);
        left = block;
      }
    }
    T* target = static_cast<T*>(out) + start;
    if constexpr (is_half<T>) {
      narrow(left, n, target);
    } else {
      std::memmove(target, left, static_cast<size_t>(n) * sizeof(T));  // left may be the target
    }
  }
}

template <typename T>
void reduce_as(Reduction reduction, const Factors& factors, const void* const* sources, int count,
               int64_t elements, void* out) {
  switch (reduction) {
    case Reduction::average:
    case Reduction::sum:
    case Reduction::adasum:  // no matter of single elements, see adasum.cc; alone it is a sum
      return reduce_with<T>(Add(), factors, sources, count, elements, out);
    case Reduction::product:
      return reduce_with<T>(Multiply(), factors, sources, count, elements, out);
    case Reduction::min:
      return reduce_with<T>(Least(), factors, sources, count, elements, out);
    case Reduction::max:
      return reduce_with<T>(Greatest(), factors, sources, count, elements, out);
  }
}

// Calls a function with a zero of the C++ type that stores a dtype.
template <typename Function>
auto with_type(DType dtype, const Function& as) {
#define HVD_CASE(dtype, name, bytes, type, ...) \
  case DType::dtype:                            \
    return as(type{});
  switch (dtype) { HVD_DTYPES(HVD_CASE) }
#undef HVD_CASE
  std::abort();  // there is no other
}

void reduce_loop(DType dtype, Reduction reduction, const Factors& factors,
                 const void* const* sources, int count, int64_t elements, void* out) {
  with_type(dtype, [&](auto zero) {
    reduce_as<decltype(zero)>(reduction, factors, sources, count, elements, out);
  });
}

}  // namespace
}  // namespace hvd
