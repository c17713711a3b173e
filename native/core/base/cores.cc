#include "core/base/cores.h"

#include <algorithm>
#include <fstream>
#include <limits>

namespace hvd {

cpu_set_t affinity() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) CPU_ZERO(&mask);
  return mask;
}

double cpu_quota(const std::string& membership, const std::string& root) {
  double quota = std::numeric_limits<double>::infinity();
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {
    if (line.compare(0, 3, "0::") != 0) continue;
    std::string group = line.substr(3);
    while (!group.empty() && group.back() == '/') group.pop_back();
    while (true) {
      std::ifstream file(root + group + "/cpu.max");
      double limit = 0, period = 0;
      if (file >> limit >> period && period > 0) quota = std::min(quota, limit / period);
      if (group.empty()) break;
      group.erase(group.rfind('/'));
    }
  }
  return quota;
}

}  // namespace hvd
