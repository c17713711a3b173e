// Tensors of a GPU that travel over the host's transports.
#pragma once

#include <vector>

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_api.h"
#include "core/request/transport.h"

namespace hvd {

// Parts of a request that all ranks can run one after the other instead of it, of 4 MiB at most;
// one part, if a result depends on more than one element of each rank.
std::vector<Request> parts_of(const Request& request);

// Copies them to page-locked memory of the host, exchanges them there and copies them back. The
// host waits for the first copy, the GPU for the second; meanwhile other parts are copied, both
// ways. All ranks call this for the same request. Adds to `held` what must live until the work
// enqueued in our stream is finished.
Status run_on_host(Gpu& gpu, Transport& host, Request& request, const Waiting& waiting,
                   const Pause& pause, const std::function<void()>& allocated,
                   std::vector<Memory>* held);

// Whether the MPI that is loaded says that it reads and writes the memory of GPUs.
bool mpi_knows_gpus();

// Whether run_over_mpi() can run this kind.
bool can_run_over_mpi(Kind kind);

// Hands the memory of the GPU to such an MPI, which knows nothing of streams: the host waits until
// the inputs are there and the outputs are free. `mpi` gives tensors to MPI as they are;
// `framework` is the stream that uses the outputs.
Status run_over_mpi(Gpu& gpu, Transport& mpi, Request& request, const Waiting& waiting,
                    const Pause& pause, CudaStream framework);

}  // namespace hvd
