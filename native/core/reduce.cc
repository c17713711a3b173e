#include "core/reduce.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

namespace hvd {
namespace {

// Elements per inner loop: two float32 blocks of it stay in the first-level cache.
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

// IEEE 754 binary16.
struct Float16 {
  uint16_t bits;

  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00)
      return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, nan
    // Exponents differ by a bias of 112; multiplying by 2^112 also makes subnormals right.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
  }

  static Float16 from(float value) {
    const uint32_t word = bits_of(value);
    const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000);
    const uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};  // nan
    if (magnitude >= 0x477ff000)
      return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds beyond 65504: inf
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 lets the FPU round at the right bit
      return {static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)))};
    }
    const uint32_t odd = magnitude >> 13 & 1;  // ties go to even
    return {static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13)};
  }
};

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }

  static BFloat16 from(float value) {
    const uint32_t word = bits_of(value);
    if ((word & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(word >> 16 | 0x40)};  // nan
    const uint32_t odd = word >> 16 & 1;
    return {static_cast<uint16_t>((word + 0x7fff + odd) >> 16)};
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

template <typename T, typename Combine>
void reduce_with(Combine combine, const Factors& factors, const void* const* sources, int count,
                 int64_t elements, void* out) {
  using A = Accumulator<T>;
  constexpr bool floating = std::is_floating_point_v<A>;
  A block[kBlock];
  for (int64_t start = 0; start < elements; start += kBlock) {
    const int64_t n = std::min(kBlock, elements - start);
    for (int s = 0; s < count; ++s) {
      const T* source = static_cast<const T*>(sources[s]) + start;
      const auto fold = [&](auto term) {
        if (s == 0) {
          for (int64_t i = 0; i < n; ++i) block[i] = term(source[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) block[i] = combine(block[i], term(source[i]));
        }
      };
      if constexpr (floating) {
        if (factors.prescale != 1.0) {
          const A factor = static_cast<A>(factors.prescale);
          fold([factor](T value) { return static_cast<A>(value) * factor; });
          continue;
        }
      }
      fold([](T value) { return static_cast<A>(value); });
    }
    if constexpr (floating) {
      // A division, not a multiplication by the reciprocal: exact where the quotient is.
      if (factors.divisor != 1.0) {
        for (int64_t i = 0; i < n; ++i) block[i] /= static_cast<A>(factors.divisor);
      }
      if (factors.postscale != 1.0) {
        for (int64_t i = 0; i < n; ++i) block[i] *= static_cast<A>(factors.postscale);
      }
    }
    T* target = static_cast<T*>(out) + start;
    for (int64_t i = 0; i < n; ++i) target[i] = round_to<T>(block[i]);
  }
}

template <typename T>
void reduce_as(Reduction reduction, const Factors& factors, const void* const* sources, int count,
               int64_t elements, void* out) {
  switch (reduction) {
    case Reduction::average:
    case Reduction::sum:
    case Reduction::adasum:  // no matter of single elements, see adasum.h; alone it is a sum
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
  switch (dtype) {
    case DType::boolean:
      return as(bool{});
    case DType::uint8:
      return as(uint8_t{});
    case DType::int8:
      return as(int8_t{});
    case DType::uint16:
      return as(uint16_t{});
    case DType::int16:
      return as(int16_t{});
    case DType::uint32:
      return as(uint32_t{});
    case DType::int32:
      return as(int32_t{});
    case DType::uint64:
      return as(uint64_t{});
    case DType::int64:
      return as(int64_t{});
    case DType::float16:
      return as(Float16{});
    case DType::bfloat16:
      return as(BFloat16{});
    case DType::float32:
      return as(float{});
    case DType::float64:
      return as(double{});
  }
  std::abort();  // there is no other
}

template <typename T>
T neutral_of(Reduction reduction) {
  using Limits = std::numeric_limits<Accumulator<T>>;
  switch (reduction) {
    case Reduction::product:
      return round_to<T>(static_cast<Accumulator<T>>(1));
    case Reduction::min:
      return round_to<T>(Limits::has_infinity ? Limits::infinity() : Limits::max());
    case Reduction::max:
      return round_to<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    default:
      return round_to<T>(static_cast<Accumulator<T>>(0));
  }
}

}  // namespace

void reduce(DType dtype, Reduction reduction, const Factors& factors, const void* const* sources,
            int count, int64_t elements, void* out) {
  with_type(dtype, [&](auto zero) {
    reduce_as<decltype(zero)>(reduction, factors, sources, count, elements, out);
  });
}

void fill_neutral(DType dtype, Reduction reduction, int64_t elements, void* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(static_cast<T*>(out), elements, neutral_of<T>(reduction));
  });
}

double dot(DType dtype, const void* a, const void* b, int64_t elements) {
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

void add_weighted(DType dtype, double weight_a, void* a, double weight_b, const void* b,
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

}  // namespace hvd
