// The interface of the core for a framework's kernels: no MPI, no engine.
#pragma once

#include <string>

#include "core/base/export.h"
#include "core/base/status.h"
#include "core/request/request.h"

namespace hvd {

// Hands a request to its engine.
HVD_EXPORT void submit(Request request);

// Lets later work of a GPU's stream wait for the outputs of all requests of a process set that are
// done and do not wait by themselves.
HVD_EXPORT Status wait_for_requests(int process_set, void* stream);

// A number of this process: "rank", "size", "local_rank", "local_size", "included" (1 or
// 0), or "set_rank" (the rank in the process set, -1 if not included); in a process set where that
// matters.
HVD_EXPORT Status look_up(const std::string& what, int process_set, int* value);

}  // namespace hvd
