#include "core/base/cores.h"

#include <algorithm>
#include <fstream>
#include <limits>

namespace hvd {

Cores affinity() {
  Cores cores{};
  if (sched_getaffinity(0, sizeof cores, cores.data()) != 0) cores = {};
  return cores;
}

int count(const Cores& cores) { return CPU_COUNT_S(sizeof cores, cores.data()); }

double cpu_quota(const std::string& membership, const std::string& root) {
  double quota = std::numeric_limits<double>::infinity();
  std::ifstream groups(membership);
  const auto next = [&](std::string* text, char end) -> bool {
    return static_cast<bool>(std::getline(groups, *text, end));
  };
  for (std::string number, controllers, group;
       next(&number, ':') && next(&controllers, ':') && next(&group, '\n');) {
    const bool unified = number == "0";
    if (!unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + (unified ? "" : "/cpu");
    while (!group.empty() && group.back() == '/') group.pop_back();
    while (true) {
      std::ifstream file(mount + group + (unified ? "/cpu.max" : "/cpu.cfs_quota_us"));
      std::ifstream other(mount + group + "/cpu.cfs_period_us");
      double limit = 0, period = 0;
      if (file >> limit && (unified ? file : other) >> period && limit > 0 && period > 0)
        quota = std::min(quota, limit / period);
      if (group.empty()) break;
      group.erase(group.rfind('/'));
    }
  }
  return quota;
}

}  // namespace hvd
