#include "core/gpu/gpu_handshake.h"

#include <algorithm>
#include <fstream>
#include <map>

#include "core/gpu/nccl_api.h"

namespace hvd {
namespace {

const char* name_of(GpuBackend backend) { return backend == GpuBackend::nccl ? "NCCL" : "MPI"; }

}  // namespace

GpuBackend backend_of(const Settings& settings, Kind kind) {
  switch (kind) {
    case Kind::allreduce:
    case Kind::reduce:
      return settings.gpu_allreduce;
    case Kind::allgather:
      return settings.gpu_allgather;
    case Kind::broadcast:
      return settings.gpu_broadcast;
    default:
      return settings.gpu_operations;
  }
}

std::string backends_text(const Settings& settings) {
  std::string text = std::string("operations ") + name_of(settings.gpu_operations);
  text += std::string(", allreduce ") + name_of(settings.gpu_allreduce);
  text += std::string(", allgather ") + name_of(settings.gpu_allgather);
  return text + ", broadcast " + name_of(settings.gpu_broadcast);
}

bool wants_nccl(const std::string& backends) { return backends.find("NCCL") != std::string::npos; }

// The kernel's, so that containers of one machine know each other.
std::string this_machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

GpuHandshake negotiate(const std::vector<GpuInfo>& all, const std::vector<int>& ranks) {
  GpuHandshake result;
  const auto rank = [&](size_t r) { return "rank " + std::to_string(ranks[r]); };
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].backends == all[0].backends) continue;
    result.refusal =
        "the ranks' settings of HVD_GPU_OPERATIONS, HVD_GPU_ALLREDUCE, "
        "HVD_GPU_ALLGATHER and HVD_GPU_BROADCAST differ: " +
        rank(0) + " has " + all[0].backends + "; " + rank(r) + " has " + all[r].backends +
        ". Set the same on all.";
    return result;
  }
  result.by_mpi =
      std::all_of(all.begin(), all.end(), [](const GpuInfo& info) { return info.mpi_knows_gpus; });
  if (!wants_nccl(all[0].backends)) return result;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].problem.empty()) continue;
    result.warning = "tensors of GPUs go through the host's memory, which is slower, since " +
                     rank(r) + " has no NCCL. " + all[r].problem +
                     " If this is what you want, set HVD_GPU_OPERATIONS=MPI.";
    return result;
  }
  std::map<std::string, size_t> seen;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].nccl_version / 100 != all[0].nccl_version / 100) {
      result.refusal = "the ranks' NCCL differs: " + rank(0) + " has " +
                       nccl_version_text(all[0].nccl_version) + ", " + rank(r) + " has " +
                       nccl_version_text(all[r].nccl_version) + ". Install the same on all.";
      return result;
    }
    const auto [other, is_new] = seen.emplace(all[r].machine + " " + all[r].bus_id, r);
    if (is_new || (all[other->second].shares && all[r].shares)) continue;
    result.refusal = rank(other->second) + " and " + rank(r) + " use the same GPU (" +
                     all[r].bus_id +
                     "), which NCCL does not allow. Start as many processes per machine as it has "
                     "GPUs, each with its own (hvd.init() gives them out). To share them, set "
                     "HVD_GPU_OPERATIONS=MPI, or, with NCCL 2.30 or later, "
                     "NCCL_MULTI_RANK_GPU_ENABLE=1, on all ranks.";
    return result;
  }
  result.nccl = true;
  return result;
}

}  // namespace hvd
