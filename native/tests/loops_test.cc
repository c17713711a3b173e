// Conversions against exact arithmetic, and the kinds of loops against each other.
#include "core/math/loops.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/math/send.h"
#include "tests/support/check.h"
#include "tests/support/small_floats.h"
#include "tests/support/tested.h"

namespace hvd {
namespace {

using test::tested;

template <typename Wide>
std::vector<uint16_t> halves(DType from, DType to, const std::vector<Wide>& values) {
  std::vector<uint16_t> out(values.size() + 1, 99);
  tested.convert(from, values.data(), to, out.data(), static_cast<int64_t>(values.size()));
  CHECK_EQ(out.back(), uint16_t{99});
  out.pop_back();
  return out;
}

template <typename Wide>
void conversions(DType wide, DType half, test::Format format) {
  // All that there is of the small format, there and back.
  std::vector<uint16_t> all(65536);
  for (int bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
  std::vector<Wide> widened(all.size());
  tested.convert(half, all.data(), wide, widened.data(), 65536);
  const std::vector<uint16_t> back = halves(wide, half, widened);
  for (int bits = 0; bits < 65536; ++bits) {
    if (is_nan(format, all[bits])) {
      CHECK(std::isnan(widened[bits]) && is_nan(format, back[bits]));
    } else {
      CHECK_EQ(static_cast<double>(widened[bits]), value_of(format, all[bits]));
      CHECK_EQ(back[bits], all[bits]);
    }
  }
  // Ties and what is beside them, as near as the wide format comes; and whatever bits there are.
  std::vector<Wide> values;
  for (int bits = 0; bits < format.infinity(); ++bits) {
    const double low = value_of(format, static_cast<uint16_t>(bits));
    double high = value_of(format, static_cast<uint16_t>(bits + 1));
    if (std::isinf(high)) high = low + (low - value_of(format, static_cast<uint16_t>(bits - 1)));
    const Wide tie = static_cast<Wide>(low + (high - low) / 2), zero = 0;
    for (Wide value : {tie, std::nextafter(tie, zero),
                       std::nextafter(tie, std::numeric_limits<Wide>::infinity())}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::mt19937_64 random(3);
  for (int i = 0; i < 30000; ++i) {
    const uint64_t bits = random();
    Wide value;
    std::memcpy(&value, &bits, sizeof value);
    values.push_back(value);
    values.push_back(static_cast<Wide>(std::ldexp(1 + bits * 0x1p-64, i % 40 - 26)));
  }
  values.push_back(std::numeric_limits<Wide>::max());
  values.push_back(std::numeric_limits<Wide>::denorm_min());
  const std::vector<uint16_t> out = halves(wide, half, values);
  for (size_t i = 0; i < values.size(); ++i) {
    test::context = std::string(tested.kind) + ", " + name_of(half) + " of " + name_of(wide) + " " +
                    test::shown(values[i]);
    if (std::isnan(values[i])) {
      CHECK(is_nan(format, out[i]));
    } else {
      CHECK_EQ(out[i], nearest(format, static_cast<double>(values[i])));
    }
  }
}

// A double too, which is not rounded to float32 before.
TEST(conversions_round_once) {
  conversions<float>(DType::float32, DType::float16, test::kFloat16);
  conversions<float>(DType::float32, DType::bfloat16, test::kBFloat16);
  conversions<double>(DType::float64, DType::float16, test::kFloat16);
  conversions<double>(DType::float64, DType::bfloat16, test::kBFloat16);
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::vector<double> doubles = {0.1, -1e300, 1e-320, infinity, 16777217, 3e38 * 1.2};
  std::vector<float> floats(doubles.size());
  tested.convert(DType::float64, doubles.data(), DType::float32, floats.data(), 6);
  std::vector<double> back(doubles.size());
  tested.convert(DType::float32, floats.data(), DType::float64, back.data(), 6);
  CHECK(floats == (std::vector<float>{0.1f, -infinity, 0, infinity, 16777216, infinity}));
  CHECK(back == std::vector<double>(floats.begin(), floats.end()));
}

bool is_nan(DType dtype, const std::vector<char>& data, int64_t index) {
  const auto at = [&](auto zero) {
    std::memcpy(&zero, data.data() + index * static_cast<int64_t>(sizeof zero), sizeof zero);
    return zero;
  };
  if (dtype == DType::float16) return is_nan(test::kFloat16, at(uint16_t{}));
  if (dtype == DType::bfloat16) return is_nan(test::kBFloat16, at(uint16_t{}));
  if (dtype == DType::float32) return std::isnan(at(float{}));
  return dtype == DType::float64 && std::isnan(at(double{}));
}

// Whatever the terms' bits are; only of several nans may any come out.
TEST(all_kinds_give_the_same_bits) {
  const Loops baseline = all_loops()[0];
  std::mt19937_64 random(7);
  for (int i = 0; i <= static_cast<int>(DType::float64); ++i) {
    const DType dtype = static_cast<DType>(i);
    const int64_t width = size_of(dtype), n = 65541;
    std::vector<std::vector<char>> sources(3, std::vector<char>(n * width));
    for (auto& source : sources) {
      for (char& byte : source)
        byte = static_cast<char>(random() & (dtype == DType::boolean ? 1 : 255));
    }
    for (int64_t k = 0; width == 2 && k < n; ++k) {  // every number there is
      const uint16_t bits = static_cast<uint16_t>(k);
      std::memcpy(&sources[0][2 * k], &bits, 2);
    }
    const auto compare = [&](int terms, const auto& run) {
      std::vector<char> wanted = sources[0], got = sources[0];
      run(baseline, wanted);
      run(tested, got);
      if (got == wanted) return;
      for (int64_t k = 0; k < n; ++k) {
        int nans = 0;
        for (int s = 0; s < terms; ++s) nans += is_nan(dtype, sources[s], k);
        if (nans > 1 && is_nan(dtype, got, k) && is_nan(dtype, wanted, k)) continue;
        test::context = std::string(tested.kind) + ", " + name_of(dtype) + ", " +
                        std::to_string(terms) + " terms, element " + std::to_string(k);
        CHECK(std::memcmp(&got[k * width], &wanted[k * width], width) == 0);
      }
    };
    const void* const pointers[] = {sources[0].data(), sources[1].data(), sources[2].data()};
    for (int count : {1, 2, 3}) {
      for (const Factors& factors : {Factors{}, Factors{0.3, 3, 1.7}}) {
        for (Reduction reduction :
             {Reduction::sum, Reduction::product, Reduction::min, Reduction::max}) {
          compare(count, [&](const Loops& loops, std::vector<char>& out) {
            loops.reduce(dtype, reduction, factors, pointers, count, n, out.data());
          });
        }
      }
    }
    compare(2, [&](const Loops& loops, std::vector<char>& out) {
      loops.add_weighted(dtype, 0.3, out.data(), 0.7, pointers[1], n);
    });
    // To all places in a line, from all places, also of less than a line.
    for (const int64_t some : {int64_t{0}, int64_t{3}, int64_t{1000}, int64_t{5000}}) {
      for (int64_t at = 0; at < 65; ++at) {
        compare(1, [&](const Loops& loops, std::vector<char>& out) {
          loops.copy_nontemporal(sources[1].data() + 65 - at, some, out.data() + at);
        });
      }
    }
    compare(1, [&](const Loops& loops, std::vector<char>& out) {
      loops.fill_neutral(dtype, Reduction::max, n, out.data());
    });
    const void* const finite = dtype < DType::float16 ? pointers[1] : pointers[0];
    const int64_t some = dtype < DType::float32 && dtype >= DType::float16 ? 0x7c00 : 1000;
    const double product = tested.dot(dtype, finite, finite, some);
    const double wanted = baseline.dot(dtype, finite, finite, some);
    CHECK(std::memcmp(&product, &wanted, sizeof product) == 0 || std::isnan(wanted));
  }
}

// The way for two sources against the sum, divided afterwards. In place, as TensorFlow forwards
// inputs.
template <typename T>
void two_sources(DType dtype) {
  std::mt19937_64 random(5);
  std::vector<T> first(10007), second(first.size());
  for (auto* source : {&first, &second}) {
    for (T& value : *source) value = std::ldexp(static_cast<T>(random()), random() % 200 - 180);
  }
  const auto n = static_cast<int64_t>(first.size());
  for (const double divisor : {1.0, 2.0, 3.0, 4.0, 1024.0}) {
    for (int place : {0, 1}) {
      std::vector<T> a = first, b = second, sum(first.size());
      const void* const sources[] = {a.data(), b.data()};
      tested.reduce(dtype, Reduction::average, {1, divisor, 1}, sources, 2, n,
                    place == 0 ? a.data() : b.data());
      for (int64_t i = 0; i < n; ++i) sum[i] = (first[i] + second[i]) / static_cast<T>(divisor);
      CHECK(std::memcmp((place == 0 ? a : b).data(), sum.data(), n * sizeof(T)) == 0);
    }
  }
}

TEST(two_sources_in_place) {
  two_sources<float>(DType::float32);
  two_sources<double>(DType::float64);
}

// Also in the calls that try both ways on their first pages.
TEST(what_is_sent_arrives) {
  std::mt19937_64 random(9);
  std::vector<char> from(20'000);
  for (char& byte : from) byte = static_cast<char>(random());
  for (int i = 0; i < 1000; ++i) {
    const size_t bytes = i % 4 == 0 ? random() % 10'000 : 8'192 + random() % 8'000;
    const size_t at = random() % 64, start = random() % 64;
    std::vector<char> to(bytes + 128, 7), wanted = to;
    send(from.data() + start, static_cast<int64_t>(bytes), to.data() + at);
    std::memcpy(wanted.data() + at, from.data() + start, bytes);
    CHECK(to == wanted);
  }
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run_for_each_kind(); }
