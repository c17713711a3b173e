// The only place where the core reads its environment: at init, and for GPU libraries before it.
#pragma once

#include <algorithm>
#include <string>

#include "core/base/status.h"

namespace hvd {

// The algorithm of an allreduce between hosts: one that suits their number, direct exchange, or
// direct exchange in a grid.
enum class Allreduce { automatic, direct, grid };

enum class GpuBackend { nccl, mpi };

struct Settings {
  // HVD_STALL_WARNING_SECONDS: how long requests may wait for other ranks before a warning names
  // them; 0: never.
  double stall_warning_seconds = 60.0;
  // HVD_TIMEOUT_SECONDS: how long before they fail on all ranks; 0: never.
  double timeout_seconds = 600.0;
  // HVD_FIRST_TIMEOUT_SECONDS: the same, if longer, for hvd.init() and the first requests: ranks
  // may be busy compiling the first step, some for much longer than others.
  double first_timeout_seconds = 1800.0;
  // HVD_MISMATCH_SECONDS: how long all ranks may wait for different collectives, while none calls
  // another, before these fail on all ranks; 0: never. Python threads may take turns
  // for some seconds.
  double mismatch_seconds = 20.0;
  // HVD_ALLREDUCE: auto, direct or grid; that of a process set's first rank counts.
  Allreduce allreduce = Allreduce::automatic;
  // HVD_TIMELINE: whether Python will ask for a trace, which all ranks must do.
  bool traces = false;
  // HVD_GPU_OPERATIONS: what transfers tensors of GPUs: NCCL, or MPI (through the host's memory).
  // By collective: HVD_GPU_ALLREDUCE, HVD_GPU_ALLGATHER, HVD_GPU_BROADCAST.
  GpuBackend gpu_operations = GpuBackend::nccl;
  GpuBackend gpu_allreduce = GpuBackend::nccl;
  GpuBackend gpu_allgather = GpuBackend::nccl;
  GpuBackend gpu_broadcast = GpuBackend::nccl;
  // NCCL_MULTI_RANK_GPU_ENABLE=1, of NCCL 2.30.
  bool ranks_share_gpus = false;
  // HVD_CUDART_LIBRARY, HVD_NCCL_LIBRARY: the files to use; empty: look for them.
  std::string cudart_library;
  std::string nccl_library;

  double timeout(bool first) const {
    if (!first || timeout_seconds == 0) return timeout_seconds;
    return first_timeout_seconds == 0 ? 0 : std::max(timeout_seconds, first_timeout_seconds);
  }
};

Status read_settings(Settings* settings);

}  // namespace hvd
