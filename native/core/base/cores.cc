#include "core/base/cores.h"

namespace hvd {

Cores affinity() {
  Cores cores{};
  if (sched_getaffinity(0, sizeof cores, cores.data()) != 0) cores = {};
  return cores;
}

int count(const Cores& cores) { return CPU_COUNT_S(sizeof cores, cores.data()); }

}  // namespace hvd
