// What ranks exchange before they use GPUs together, and what they decide from it. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "core/base/settings.h"
#include "core/request/request.h"

namespace hvd {

struct GpuInfo {
  std::string backends;  // the settings: which kinds use NCCL
  std::string machine;   // the same for all processes of a machine
  std::string bus_id;    // of the GPU
  int nccl_version = 0;
  std::string problem;  // why there is no NCCL
  std::string id;       // rank 0: NCCL's name for the set
  bool mpi_knows_gpus = false;
  bool shares = false;  // whether its NCCL lets ranks use the same GPU

  template <typename Bytes>
  void fields(Bytes& bytes) {
    bytes(backends, machine, bus_id, nccl_version, problem, id, mpi_knows_gpus, shares);
  }
};

struct GpuHandshake {
  bool nccl = false;    // whether to create a communicator
  bool by_mpi = false;  // whether MPI can have the memory of GPUs
  std::string refusal;  // why GPUs cannot be used together at all
  std::string warning;  // why NCCL is not used, although it was asked for
};

// The same result on all ranks. `ranks` are numbers in the job, by rank of the set.
GpuHandshake negotiate(const std::vector<GpuInfo>& all, const std::vector<int>& ranks);

GpuBackend backend_of(const Settings& settings, Kind kind);
std::string backends_text(const Settings& settings);
bool wants_nccl(const std::string& backends);
std::string this_machine();

}  // namespace hvd
