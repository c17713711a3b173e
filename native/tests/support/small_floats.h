// 16-bit floats by their definition, in exact double arithmetic: slow, and free of the bit tricks
// that the core uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace hvd::test {

struct Format {
  int mantissa_bits;
  int least_exponent;  // of a normal number

  int infinity() const { return 0x8000 - (1 << mantissa_bits); }
};

constexpr Format kFloat16{10, -14};
constexpr Format kBFloat16{7, -126};

inline double value_of(Format format, uint16_t bits) {
  const int magnitude = bits & 0x7fff;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (magnitude > format.infinity()) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == format.infinity()) return sign * std::numeric_limits<double>::infinity();
  const int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
  const int exponent = magnitude >> format.mantissa_bits;
  const int ulp = format.least_exponent - format.mantissa_bits;
  if (exponent == 0) return sign * std::ldexp(mantissa, ulp);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits), ulp + exponent - 1);
}

inline bool is_nan(Format format, uint16_t bits) { return (bits & 0x7fff) > format.infinity(); }

// The nearest number; the even one of two.
inline uint16_t nearest(Format format, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7fff);
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | format.infinity());
  const int exponent = magnitude == 0 ? format.least_exponent
                                      : std::max(format.least_exponent, std::ilogb(magnitude));
  // A mantissa that is rounded up to a power of two carries into the exponent, at last to infinity.
  const double mantissa = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const double bits = std::ldexp(exponent - format.least_exponent, format.mantissa_bits) + mantissa;
  return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(bits, format.infinity())));
}

}  // namespace hvd::test
