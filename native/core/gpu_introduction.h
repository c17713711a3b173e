// What ranks tell each other before they use GPUs together, and what follows. Pure.
#pragma once

#include <string>
#include <vector>

#include "core/request.h"
#include "core/settings.h"

namespace hvd {

struct Introduction {
  std::string ways;     // the settings: which kinds go by NCCL
  std::string machine;  // the same for all processes of a machine
  std::string bus_id;   // of the GPU
  int nccl_version = 0;
  std::string problem;  // why there is no NCCL
  std::string id;       // rank 0: NCCL's name for the set
};

struct Meeting {
  bool nccl = false;    // whether there shall be a communicator
  std::string refusal;  // why GPUs cannot be used together at all
  std::string warning;  // why not by NCCL, though it was wanted
};

// All ranks come to the same. `ranks` of the job, by rank of the set.
Meeting meet(const std::vector<Introduction>& all, const std::vector<int>& ranks);

std::string encode(const Introduction& introduction);
Introduction decode_introduction(const std::string& bytes);

GpuWay chosen_way(const Settings& settings, Kind kind);
std::string ways_text(const Settings& settings);
bool wants_nccl(const std::string& ways);
std::string this_machine();

}  // namespace hvd
