// Runs a test of the loops once for each kind of them that this CPU can run.
#pragma once

#include <cstdio>
#include <vector>

#include "core/math/loops.h"
#include "tests/support/check.h"

namespace hvd::test {

inline Loops tested;

inline int run_for_each_kind() {
  for (const Loops& kind : all_loops()) {
    tested = kind;
    std::printf("compiled for: %s\n", kind.kind);
    if (const int status = run()) return status;
  }
  return 0;
}

}  // namespace hvd::test
