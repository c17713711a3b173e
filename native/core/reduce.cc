#include "core/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/loops.h"

namespace hvd {
namespace {

const Loops& fastest() {
  static const Loops fastest = loops().back();
  return fastest;
}

}  // namespace

std::vector<Loops> loops() {
  std::vector<Loops> all = {baseline_loops()};
#if defined(__x86_64__)
  // Not every compiler's __builtin_cpu_supports knows F16C.
  unsigned a = 0, b = 0, features = 0, d = 0;
  __get_cpuid(1, &a, &b, &features, &d);
  if (__builtin_cpu_supports("avx2") && (features & bit_F16C)) all.push_back(avx2_loops());
#endif
  return all;
}

void reduce(DType dtype, Reduction reduction, const Factors& factors, const void* const* sources,
            int count, int64_t elements, void* out) {
  fastest().reduce(dtype, reduction, factors, sources, count, elements, out);
}

void convert(DType from, const void* in, DType to, void* out, int64_t elements) {
  fastest().convert(from, in, to, out, elements);
}

void fill_neutral(DType dtype, Reduction reduction, int64_t elements, void* out) {
  fastest().fill_neutral(dtype, reduction, elements, out);
}

double dot(DType dtype, const void* a, const void* b, int64_t elements) {
  return fastest().dot(dtype, a, b, elements);
}

void add_weighted(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                  int64_t elements) {
  fastest().add_weighted(dtype, weight_a, a, weight_b, b, elements);
}

}  // namespace hvd
