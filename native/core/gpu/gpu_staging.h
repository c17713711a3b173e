// Tensors of a GPU that travel over the host's transports: copied to page-locked memory of the
// host, exchanged there, copied back. The host waits for the first copy, the GPU for the second.
#pragma once

#include <vector>

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_communicator.h"
#include "core/request/transport.h"

namespace hvd {

// All ranks call this for the same request. Adds to `held` what must live until the work enqueued
// in our stream is finished.
Status run_on_host(Gpu& gpu, Transport& host, Request& request, const Waiting& waiting,
                   const Pause& pause, const std::function<void()>& allocated,
                   std::vector<Memory>* held);

}  // namespace hvd
