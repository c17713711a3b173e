// The collectives, over NCCL. All are enqueued in one stream, which no host waits for.
//
// A group of NCCL's calls carries all tensors of a request. Sums run in the tensors' own dtype and
// in NCCL's order: equal on all ranks, but not the bits of the host's transports.
#pragma once

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_api.h"
#include "core/math/layout.h"
#include "core/request/transport.h"

namespace hvd {

class NcclCollectives {
 public:
  // `host` connects the same ranks; sizes are exchanged over it.
  NcclCollectives(NcclCommunicator& communicator, Transport& host, CudaStream stream)
      : communicator_(communicator), host_(host), stream_(stream) {}

  // Whether NCCL computes this at all: not Adasum, 16-bit integers, or scaled minima.
  static bool can(const Request& request, int size);

  // All ranks call this for the same request. Calls `allocated` after the outputs are allocated,
  // before their use.
  Status run(Request& request, const Waiting& waiting, const Pause& pause,
             const std::function<void()>& allocated);

 private:
  class Operation;

  void allgather(const Request& request, size_t i, const std::vector<int64_t>& of_ranks);
  void exchange(const std::vector<Part>& sent, const std::vector<Part>& received);
  void reducescatter(const Request& request, size_t i, int op);
  void check(int result, const char* call) const { communicator_.check(result, call); }
  const NcclApi& nccl() const { return communicator_.api(); }

  NcclCommunicator& communicator_;
  Transport& host_;
  const CudaStream stream_;
};

}  // namespace hvd
