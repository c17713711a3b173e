// The functions of reduce.h, compiled for each kind of CPU: loops_baseline.cc runs on all,
// loops_avx2.cc on x86-64 with AVX2 and F16C.
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
  void (*reduce)(DType dtype, Reduction reduction, const Factors& factors,
                 const void* const* sources, int count, int64_t elements, void* out);
  void (*convert)(DType from, const void* in, DType to, void* out, int64_t elements);
  void (*fill_neutral)(DType dtype, Reduction reduction, int64_t elements, void* out);
  double (*dot)(DType dtype, const void* a, const void* b, int64_t elements);
  void (*add_weighted)(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                       int64_t elements);
};

Loops baseline_loops();
Loops avx2_loops();

// All that this CPU can run, the fastest last.
std::vector<Loops> loops();

}  // namespace hvd
