#include "core/gpu_introduction.h"

#include <fstream>
#include <map>

#include "core/bytes.h"
#include "core/nccl_api.h"

namespace hvd {
namespace {

const char* name_of(GpuWay way) { return way == GpuWay::nccl ? "NCCL" : "MPI"; }

}  // namespace

GpuWay chosen_way(const Settings& settings, Kind kind) {
  switch (kind) {
    case Kind::allreduce:
      return settings.gpu_allreduce;
    case Kind::allgather:
      return settings.gpu_allgather;
    case Kind::broadcast:
      return settings.gpu_broadcast;
    default:
      return settings.gpu_operations;
  }
}

std::string ways_text(const Settings& settings) {
  std::string text = std::string("operations ") + name_of(settings.gpu_operations);
  text += std::string(", allreduce ") + name_of(settings.gpu_allreduce);
  text += std::string(", allgather ") + name_of(settings.gpu_allgather);
  return text + ", broadcast " + name_of(settings.gpu_broadcast);
}

bool wants_nccl(const std::string& ways) { return ways.find("NCCL") != std::string::npos; }

// The kernel's, so that containers of one machine know each other.
std::string this_machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

Meeting meet(const std::vector<Introduction>& all, const std::vector<int>& ranks) {
  Meeting meeting;
  const auto rank = [&](size_t r) { return "rank " + std::to_string(ranks[r]); };
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].ways == all[0].ways) continue;
    meeting.refusal =
        "the ranks' settings of HVD_GPU_OPERATIONS, HVD_GPU_ALLREDUCE, "
        "HVD_GPU_ALLGATHER and HVD_GPU_BROADCAST differ: " +
        rank(0) + " has " + all[0].ways + "; " + rank(r) + " has " + all[r].ways +
        ". Set the same on all.";
    return meeting;
  }
  if (!wants_nccl(all[0].ways)) return meeting;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].problem.empty()) continue;
    meeting.warning = "tensors of GPUs go through the host's memory, which is slower, since " +
                      rank(r) + " has no NCCL. " + all[r].problem +
                      " If this is what you want, set HVD_GPU_OPERATIONS=MPI.";
    return meeting;
  }
  std::map<std::string, size_t> seen;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].nccl_version / 100 != all[0].nccl_version / 100) {
      meeting.refusal = "the ranks' NCCL differs: " + rank(0) + " has " +
                        nccl_version_text(all[0].nccl_version) + ", " + rank(r) + " has " +
                        nccl_version_text(all[r].nccl_version) + ". Install the same on all.";
      return meeting;
    }
    const auto [other, is_new] = seen.emplace(all[r].machine + " " + all[r].bus_id, r);
    if (is_new) continue;
    meeting.refusal = rank(other->second) + " and " + rank(r) + " use the same GPU (" +
                      all[r].bus_id +
                      "), which NCCL cannot. Start as many processes per machine as it has GPUs, "
                      "each with its own (hvd.init() gives them out), or set "
                      "HVD_GPU_OPERATIONS=MPI to share them.";
    return meeting;
  }
  meeting.nccl = true;
  return meeting;
}

std::string encode(const Introduction& introduction) {
  Writer out;
  out.text(introduction.ways);
  out.text(introduction.machine);
  out.text(introduction.bus_id);
  out.number(introduction.nccl_version);
  out.text(introduction.problem);
  out.text(introduction.id);
  return out.take();
}

Introduction decode_introduction(const std::string& bytes) {
  Reader in(bytes);
  Introduction introduction;
  introduction.ways = in.text();
  introduction.machine = in.text();
  introduction.bus_id = in.text();
  introduction.nccl_version = in.number<int>();
  introduction.problem = in.text();
  introduction.id = in.text();
  return introduction;
}

}  // namespace hvd
