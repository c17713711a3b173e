#include "core/math/loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hvd {

std::vector<Loops> all_loops() {
  std::vector<Loops> all = {baseline_loops()};
#if defined(__x86_64__)
  // Not every compiler's __builtin_cpu_supports knows F16C.
  unsigned a = 0, b = 0, features = 0, d = 0;
  __get_cpuid(1, &a, &b, &features, &d);
  if (__builtin_cpu_supports("avx2") && (features & bit_F16C)) all.push_back(avx2_loops());
#endif
  return all;
}

const Loops& loops() {
  static const Loops fastest = all_loops().back();
  return fastest;
}

}  // namespace hvd
