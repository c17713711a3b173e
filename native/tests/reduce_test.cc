// Reductions against exact arithmetic: modulo 2^64 for integers, double for floats.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/math/loops.h"
#include "tests/support/check.h"
#include "tests/support/small_floats.h"
#include "tests/support/tested.h"

namespace hvd {
namespace {

constexpr Reduction kArithmetic[] = {Reduction::sum, Reduction::product, Reduction::min,
                                     Reduction::max};
using test::tested;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// How a dtype is stored, and what a number of it is worth.
template <typename T>
struct Plain {
  using Stored = T;
  static Stored store(double value) { return static_cast<T>(value); }
  static double value(Stored stored) { return static_cast<double>(stored); }
};
template <const test::Format& format>
struct Small {
  using Stored = uint16_t;
  static Stored store(double value) { return test::nearest(format, value); }
  static double value(Stored stored) { return test::value_of(format, stored); }
};
using Float16 = Small<test::kFloat16>;
using BFloat16 = Small<test::kBFloat16>;

template <typename T>
std::vector<T> reduced(DType dtype, Reduction reduction, const std::vector<std::vector<T>>& sources,
                       double prescale = 1, double postscale = 1) {
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  const size_t n = sources[0].size();
  std::vector<T> out(n + 1, T{99});
  const double divisor = reduction == Reduction::average ? sources.size() : 1.0;
  tested.reduce(dtype, reduction, {prescale, divisor, postscale}, pointers.data(),
                static_cast<int>(sources.size()), static_cast<int64_t>(n), out.data());
  CHECK_EQ(out[n], T{99});  // nothing is written behind the end
  out.resize(n);
  return out;
}

// Of single terms; in as many elements as make a vector of the CPU, and some more.
template <typename T>
T one(DType dtype, Reduction reduction, const std::vector<T>& terms, double prescale = 1,
      double postscale = 1) {
  std::vector<std::vector<T>> sources;
  for (T term : terms) sources.emplace_back(19, term);
  const std::vector<T> out = reduced(dtype, reduction, sources, prescale, postscale);
  CHECK(std::memcmp(&out[0], &out[1], (out.size() - 1) * sizeof(T)) == 0);
  return out[0];
}

// Small, of both signs, different for each source and element.
int64_t term(int source, int64_t index) { return (index * 7 + source * 5) % 11 - 4; }

const char* const kNames[] = {"Average", "Sum", "Min", "Max", "Product"};

void set_context(const std::string& dtype, Reduction reduction, int sources, int64_t length) {
  test::context = dtype + " " + kNames[static_cast<int>(reduction)] + " of " +
                  std::to_string(sources) + " sources, length " + std::to_string(length);
}

// Calls `expected(reduction, sources, index)` for what must come out of term().
template <typename Codec, typename Expected>
void sweep(DType dtype, const Expected& expected) {
  using T = typename Codec::Stored;
  for (Reduction reduction : kArithmetic) {
    for (int count = 1; count <= 5; ++count) {
      for (int64_t length : {0, 1, 1023, 1024, 1025, 5000}) {
        set_context(name_of(dtype), reduction, count, length);
        std::vector<std::vector<T>> sources(count);
        for (int s = 0; s < count; ++s) {
          for (int64_t i = 0; i < length; ++i)
            sources[s].push_back(Codec::store(static_cast<double>(term(s, i))));
        }
        const std::vector<T> out = reduced(dtype, reduction, sources);
        for (int64_t i = 0; i < length; ++i) CHECK_EQ(out[i], expected(reduction, sources, i));
      }
    }
  }
}

template <typename T>
T expected_integer(Reduction reduction, const std::vector<std::vector<T>>& sources, int64_t index) {
  T least = sources[0][index], greatest = least;
  uint64_t sum = 0, product = 1;
  for (const auto& source : sources) {
    least = std::min(least, source[index]);
    greatest = std::max(greatest, source[index]);
    sum += static_cast<uint64_t>(source[index]);
    product *= static_cast<uint64_t>(source[index]);
  }
  if (reduction == Reduction::min) return least;
  if (reduction == Reduction::max) return greatest;
  return static_cast<T>(reduction == Reduction::sum ? sum : product);
}

template <typename T>
struct Integer {
  using Stored = T;
  static T store(double value) {
    return static_cast<T>(static_cast<int64_t>(value));
  }  // negative ones wrap
};

template <typename T>
void sweep_integers(DType dtype) {
  sweep<Integer<T>>(dtype, expected_integer<T>);
}

TEST(integers) {
  sweep_integers<uint8_t>(DType::uint8);
  sweep_integers<int8_t>(DType::int8);
  sweep_integers<uint16_t>(DType::uint16);
  sweep_integers<int16_t>(DType::int16);
  sweep_integers<uint32_t>(DType::uint32);
  sweep_integers<int32_t>(DType::int32);
  sweep_integers<uint64_t>(DType::uint64);
  sweep_integers<int64_t>(DType::int64);
}

template <typename Codec>
void sweep_floats(DType dtype) {
  using T = typename Codec::Stored;
  sweep<Codec>(dtype,
               [](Reduction reduction, const std::vector<std::vector<T>>& sources, int64_t index) {
                 double result = Codec::value(sources[0][index]);
                 for (size_t s = 1; s < sources.size(); ++s) {
                   const double next = Codec::value(sources[s][index]);
                   if (reduction == Reduction::sum) result += next;
                   if (reduction == Reduction::product) result *= next;
                   if (reduction == Reduction::min) result = std::min(result, next);
                   if (reduction == Reduction::max) result = std::max(result, next);
                 }
                 return Codec::store(result);
               });
}

TEST(floats) {
  sweep_floats<Plain<float>>(DType::float32);
  sweep_floats<Plain<double>>(DType::float64);
  sweep_floats<Float16>(DType::float16);
  sweep_floats<BFloat16>(DType::bfloat16);
}

TEST(bools) {
  for (int bits = 0; bits < 8; ++bits) {
    const std::vector<uint8_t> terms = {static_cast<uint8_t>(bits & 1),
                                        static_cast<uint8_t>(bits >> 1 & 1),
                                        static_cast<uint8_t>(bits >> 2)};
    CHECK_EQ(one(DType::boolean, Reduction::min, terms), static_cast<uint8_t>(bits == 7));
    CHECK_EQ(one(DType::boolean, Reduction::max, terms), static_cast<uint8_t>(bits != 0));
  }
}

TEST(integers_wrap_around) {
  CHECK_EQ(one<int8_t>(DType::int8, Reduction::sum, {127, 1}), int8_t{-128});
  CHECK_EQ(one<uint8_t>(DType::uint8, Reduction::sum, {255, 2}), uint8_t{1});
  CHECK_EQ(one<uint16_t>(DType::uint16, Reduction::product, {65535, 65535}), uint16_t{1});
  CHECK_EQ(one<int32_t>(DType::int32, Reduction::sum, {2147483647, 2}), int32_t{-2147483647});
  CHECK_EQ(one<int64_t>(DType::int64, Reduction::product, {int64_t{1} << 62, 2}),
           std::numeric_limits<int64_t>::min());
  CHECK_EQ(one<uint64_t>(DType::uint64, Reduction::sum, {~uint64_t{0}, 3}), uint64_t{2});
  // Beyond what a double holds.
  const int64_t big = (int64_t{1} << 53) + 1;
  CHECK_EQ(one<int64_t>(DType::int64, Reduction::max, {big - 1, big}), big);
  CHECK_EQ(one<int64_t>(DType::int64, Reduction::sum, {big, 1}), big + 1);
}

void every_small_float_survives(DType dtype, test::Format format) {
  std::vector<uint16_t> all(65536);
  for (int bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
  for (Reduction reduction :
       {Reduction::average, Reduction::sum, Reduction::min, Reduction::max, Reduction::product}) {
    const std::vector<uint16_t> out = reduced<uint16_t>(dtype, reduction, {all});
    for (int bits = 0; bits < 65536; ++bits) {
      if (is_nan(format, all[bits])) {
        CHECK(is_nan(format, out[bits]));
      } else {
        CHECK_EQ(out[bits], all[bits]);
      }
    }
  }
}

TEST(small_floats_survive) {
  every_small_float_survives(DType::float16, test::kFloat16);
  every_small_float_survives(DType::bfloat16, test::kBFloat16);
}

// A one times a factor is that factor in float32, and then rounded. Between each two neighbours:
// the tie, and the numbers beside it. The last tie is the one with infinity.
template <typename Codec>
void every_tie_goes_to_even(DType dtype, test::Format format) {
  const uint16_t unit = Codec::store(1);
  for (int bits = 0; bits < format.infinity(); ++bits) {
    const double low = value_of(format, static_cast<uint16_t>(bits));
    double high = value_of(format, static_cast<uint16_t>(bits + 1));
    if (std::isinf(high)) high = low + (low - value_of(format, static_cast<uint16_t>(bits - 1)));
    const float tie = static_cast<float>(low + (high - low) / 2);
    const int even = bits & 1 ? bits + 1 : bits;
    test::context = std::string(name_of(dtype)) + " after " + std::to_string(bits);
    for (int sign : {1, -1}) {
      const int top = sign < 0 ? 0x8000 : 0;
      const auto rounded = [&](float factor) {
        return static_cast<int>(one<uint16_t>(dtype, Reduction::sum, {unit}, sign * factor));
      };
      CHECK_EQ(rounded(tie), top | even);
      CHECK_EQ(rounded(std::nextafter(tie, 0.0f)), top | bits);
      CHECK_EQ(rounded(std::nextafter(tie, kInfinity)), top | (bits + 1));
      CHECK_EQ(static_cast<int>(Codec::store(sign * static_cast<double>(tie))),
               top | even);  // the reference too
    }
  }
  CHECK_EQ(one<uint16_t>(dtype, Reduction::sum, {unit}, 3e38 * 1e38),
           static_cast<uint16_t>(format.infinity()));
  CHECK(is_nan(format, one<uint16_t>(dtype, Reduction::sum, {unit}, kNan)));
}

TEST(ties_go_to_even) {
  every_tie_goes_to_even<Float16>(DType::float16, test::kFloat16);
  every_tie_goes_to_even<BFloat16>(DType::bfloat16, test::kBFloat16);
}

TEST(small_floats_overflow_to_infinity) {
  const auto f16 = [](double value) { return Float16::store(value); };
  CHECK_EQ(one<uint16_t>(DType::float16, Reduction::sum, {f16(65504), f16(15)}), f16(65504));
  CHECK_EQ(one<uint16_t>(DType::float16, Reduction::sum, {f16(65504), f16(16)}), uint16_t{0x7c00});
  CHECK_EQ(one<uint16_t>(DType::float16, Reduction::sum, {f16(-65504), f16(-65504)}),
           uint16_t{0xfc00});
  // Not so on the way: 65504 + 65504 is no infinity in float32.
  CHECK_EQ(one<uint16_t>(DType::float16, Reduction::sum, {f16(65504), f16(65504), f16(-65504)}),
           f16(65504));
  CHECK_EQ(one<uint16_t>(DType::float16, Reduction::average, {f16(65504), f16(65504)}), f16(65504));
  const uint16_t most = 0x7f7f;
  CHECK_EQ(one<uint16_t>(DType::bfloat16, Reduction::sum, {most, most}), uint16_t{0x7f80});
}

// Rounded after each sum, 2048 + 1 stays 2048 in float16, and 256 + 1 stays 256 in bfloat16.
TEST(small_floats_accumulate_in_float32) {
  const auto sum = [](DType dtype, auto codec, double first) {
    using Codec = decltype(codec);
    const uint16_t unit = Codec::store(1);
    return Codec::value(
        one<uint16_t>(dtype, Reduction::sum, {Codec::store(first), unit, unit, unit, unit}));
  };
  CHECK_EQ(sum(DType::float16, Float16(), 2048), 2052.0);
  CHECK_EQ(sum(DType::bfloat16, BFloat16(), 256), 260.0);
  // And in float32, not in a wider type, which would keep the one.
  const auto cancel = [](DType dtype, auto codec) {
    using Codec = decltype(codec);
    const uint16_t big = Codec::store(16384), minus = Codec::store(-16384),
                   tiny = Codec::store(1 / 4096.0);
    return Codec::value(one<uint16_t>(dtype, Reduction::sum, {big, tiny, minus}));
  };
  CHECK_EQ(cancel(DType::float16, Float16()), 0.0);
  CHECK_EQ(cancel(DType::bfloat16, BFloat16()), 0.0);
}

// Sums depend on the order: it is that of the sources.
TEST(terms_are_combined_in_order) {
  const float big = 16777216;  // 2^24: one more is lost
  CHECK_EQ(one<float>(DType::float32, Reduction::sum, {big, 1, -big}), 0.0f);
  CHECK_EQ(one<float>(DType::float32, Reduction::sum, {big, -big, 1}), 1.0f);
  CHECK_EQ(one<float>(DType::float32, Reduction::sum, {1, big, -big}), 0.0f);
  CHECK_EQ(one<double>(DType::float64, Reduction::sum, {big, 1, -big}), 1.0);
}

template <typename Codec>
void nan_wins(DType dtype) {
  using T = typename Codec::Stored;
  for (Reduction reduction : {Reduction::min, Reduction::max}) {
    for (int count = 1; count <= 5; ++count) {
      for (int at = 0; at < count; ++at) {
        for (double rest :
             {1.0, -1.0, static_cast<double>(kInfinity), -static_cast<double>(kInfinity)}) {
          set_context(name_of(dtype), reduction, count, at);
          std::vector<T> terms(count, Codec::store(rest));
          CHECK_EQ(Codec::value(one(dtype, reduction, terms)), rest);
          terms[at] = Codec::store(kNan);
          CHECK(std::isnan(Codec::value(one(dtype, reduction, terms))));
        }
      }
    }
  }
}

TEST(nan_wins_from_any_rank) {
  nan_wins<Plain<float>>(DType::float32);
  nan_wins<Plain<double>>(DType::float64);
  nan_wins<Float16>(DType::float16);
  nan_wins<BFloat16>(DType::bfloat16);
}

template <typename Codec>
void scales_exactly(DType dtype) {
  using T = typename Codec::Stored;
  for (int count = 1; count <= 5; ++count) {
    for (Reduction reduction :
         {Reduction::average, Reduction::sum, Reduction::min, Reduction::max}) {
      set_context(name_of(dtype), reduction, count, 2000);
      std::vector<std::vector<T>> sources(count);
      std::vector<T> expected;
      for (int i = 0; i < 2000; ++i) {
        double sum = 0, least = kInfinity, greatest = -kInfinity;
        for (int s = 0; s < count; ++s) {
          const double value =
              static_cast<double>(term(s, i)) * count;  // so that the average is a whole number
          sources[s].push_back(Codec::store(value));
          sum += value * -0.5;
          least = std::min(least, value * -0.5);
          greatest = std::max(greatest, value * -0.5);
        }
        const double result = reduction == Reduction::average ? sum / count
                              : reduction == Reduction::sum   ? sum
                              : reduction == Reduction::min   ? least
                                                              : greatest;
        expected.push_back(Codec::store(result * 4));
      }
      const std::vector<T> out = reduced(dtype, reduction, sources, -0.5, 4);
      for (size_t i = 0; i < out.size(); ++i)
        CHECK_EQ(Codec::value(out[i]), Codec::value(expected[i]));
    }
  }
}

TEST(scale_factors_and_averages_are_exact) {
  scales_exactly<Plain<float>>(DType::float32);
  scales_exactly<Plain<double>>(DType::float64);
  scales_exactly<Float16>(DType::float16);
  scales_exactly<BFloat16>(DType::bfloat16);
  // The factor is applied before anything can overflow, and to each term of a product.
  CHECK_EQ(one<float>(DType::float32, Reduction::sum, {2e38f, 2e38f}, 0.5), 2e38f);
  CHECK_EQ(one<float>(DType::float32, Reduction::product, {3, 5}, 2, 0.5), 30.0f);
}

// Many a quotient is not the product with the rounded reciprocal.
TEST(averages_divide) {
  for (int count : {3, 5}) {
    std::vector<std::vector<float>> sources(count, std::vector<float>(5000, 0));
    for (int i = 0; i < 5000; ++i) sources[i % count][i] = static_cast<float>(i);
    const std::vector<float> out = reduced(DType::float32, Reduction::average, sources);
    for (int i = 0; i < 5000; ++i)
      CHECK_EQ(out[i], static_cast<float>(i) / static_cast<float>(count));
  }
}

TEST(the_output_may_be_a_source) {
  for (size_t alias = 0; alias < 3; ++alias) {
    std::vector<std::vector<float>> sources(3);
    for (int s = 0; s < 3; ++s) {
      for (int i = 0; i < 5000; ++i) sources[s].push_back(static_cast<float>(term(s, i)));
    }
    const std::vector<float> expected = reduced(DType::float32, Reduction::sum, sources);
    const void* pointers[] = {sources[0].data(), sources[1].data(), sources[2].data()};
    tested.reduce(DType::float32, Reduction::sum, {}, pointers, 3, 5000, sources[alias].data());
    CHECK(sources[alias] == expected);
  }
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run_for_each_kind(); }
