#pragma once

#include <mpi.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "core/cpu/cluster_transport.h"
#include "core/cpu/host_transport.h"
#include "core/cpu/mpi_transport.h"
#include "tests/simulate/simulation.h"

namespace hvd::sim {

// As world.cc chooses it.
inline std::unique_ptr<Transport> new_transport(MPI_Comm communicator,
                                                const std::vector<int>& ranks, int few,
                                                Allreduce algorithm) {
  auto mpi = std::make_unique<MpiTransport>(communicator, ranks, few);
  MPI_Comm host;
  MPI_Comm_split(communicator, simulation->process().host, mpi->rank(), &host);
  int neighbours, most;
  MPI_Comm_size(host, &neighbours);
  MPI_Allreduce(&neighbours, &most, 1, MPI_INT, MPI_MAX, communicator);
  try {
    if (most == mpi->size()) return std::make_unique<HostTransport>(&mpi);
    return std::make_unique<ClusterTransport>(&mpi, host, algorithm);
  } catch (const std::runtime_error&) {
    return mpi;
  }
}

}  // namespace hvd::sim
