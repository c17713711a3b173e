// Tensors of a GPU that travel over the host's transports: copied to page-locked memory of the
// host, exchanged there, copied back. The host waits for the first copy, the GPU for the second.
#pragma once

#include <vector>

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_communicator.h"
#include "core/request/transport.h"

namespace hvd {

// All ranks come here alike. Adds what must live until our stream has done what it was given.
Status run_on_host(Gpu& gpu, Transport& host, Request& request, const Waiting& waiting,
                   const Pause& pause, const std::function<void()>& allocated,
                   std::vector<Memory>* held);

}  // namespace hvd
