// CPU cores that processes may use: their affinity masks and the quota of their control groups.
#pragma once

#include <sched.h>

#include <array>
#include <string>

namespace hvd {

// A mask of 8,192 cores; no Linux has more.
using Cores = std::array<cpu_set_t, 8>;

// The cores that this process may run on.
Cores affinity();

int count(const Cores& cores);

// Cores' worth of CPU time that control groups leave this process, infinity without a limit. A
// group is bound by its own limit and by those of all groups above it. `membership` is
// this process's /proc/self/cgroup, `root` where the groups are mounted.
double cpu_quota(const std::string& membership = "/proc/self/cgroup",
                 const std::string& root = "/sys/fs/cgroup");

}  // namespace hvd
