// Element-wise loops over memory. They know no ranks, messages or requests. Compiled for each kind
// of CPU: loops_baseline.cc runs on all, loops_avx2.cc on x86-64 with AVX2 and F16C.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/dtype.h"

namespace hvd {

struct Factors {
  double prescale = 1.0;   // of each term
  double divisor = 1.0;    // of the result
  double postscale = 1.0;  // of the quotient
};

// All kinds give the same bits (but if several terms are nan, any of them may come out).
struct Loops {
  const char* kind;

  // out[i] = scale(sources[0][i] ∘ sources[1][i] ∘ …), where ∘ is the reduction (an average adds);
  // the terms are combined in the order given, so that equal inputs give equal bits wherever it is
  // computed.
  //
  // float16 and bfloat16 are accumulated in float32 and rounded once. Integers are not scaled, and
  // wrap around. For bool, min is `and` and max is `or`. `out` may be one of the sources.
  void (*reduce)(DType dtype, Reduction reduction, const Factors& factors,
                 const void* const* sources, int count, int64_t elements, void* out);

  // Between floating-point dtypes of different sizes; to the narrower one rounded once, to the
  // nearest, ties to even, and to infinity beyond its range.
  void (*convert)(DType from, const void* in, DType to, void* out, int64_t elements);

  // Fills with the value that leaves the others' as they are: 0 for sums, 1 for products, the
  // greatest there is for min, the least for max.
  void (*fill_neutral)(DType dtype, Reduction reduction, int64_t elements, void* out);

  // The dot product of two vectors, accumulated in float64.
  double (*dot)(DType dtype, const void* a, const void* b, int64_t elements);

  // a = weight_a * a + weight_b * b, in float64, rounded once.
  void (*add_weighted)(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                       int64_t elements);

  // Copies past the caches, if it is much and the CPU can. The bytes arrive before whatever the
  // caller stores next. The two must not overlap.
  void (*copy_nontemporal)(const void* from, int64_t bytes, void* to);
};

Loops baseline_loops();
Loops avx2_loops();

// All that this CPU can run, the fastest last.
std::vector<Loops> all_loops();

// The fastest that this CPU can run.
const Loops& loops();

}  // namespace hvd
