// CPU cores that processes may use: their affinity masks and the quota of their control groups.
#pragma once

#include <sched.h>

#include <string>

namespace hvd {

// The cores that this process may run on; none if the kernel has more than fit into a cpu_set_t.
cpu_set_t affinity();

// Cores' worth of CPU time that control groups (version 2) leave this process, infinity without a
// limit. A group is bound by its own limit and by those of all groups above it. `membership` is
// this process's /proc/self/cgroup, `root` where the groups are mounted.
double cpu_quota(const std::string& membership = "/proc/self/cgroup",
                 const std::string& root = "/sys/fs/cgroup");

}  // namespace hvd
