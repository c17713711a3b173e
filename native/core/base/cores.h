// CPU cores that processes may use: their affinity masks and the quota of their control groups.
#pragma once

#include <sched.h>

#include <array>
#include <limits>

namespace hvd {

// A mask of 8,192 cores; no Linux has more.
using Cores = std::array<cpu_set_t, 8>;

// The cores that this process may run on.
Cores affinity();

int count(const Cores& cores);

// Cores' worth of CPU time that control groups leave this process, as hvd_init() was told.
inline double cpu_quota = std::numeric_limits<double>::infinity();

}  // namespace hvd
