// The loops of reduce.h, for each kind of CPU for which they are compiled: loops_baseline.cc runs
// on all, loops_avx2.cc on x86-64 with AVX2 and F16C.
#pragma once

#include "core/reduce.h"

namespace hvd {

Loops baseline_loops();
Loops avx2_loops();

}  // namespace hvd
