// NCCL between the ranks of a process set. Nothing blocks in it: whatever takes longer is asked for
// again and again, with a pause in which the caller may lose waiter.
#pragma once

#include <functional>
#include <string>

#include "core/gpu/nccl_api.h"

namespace hvd {

// Called between two looks; throws to end the wait.
using Pause = std::function<void()>;

class NcclCommunicator {
 public:
  // Collective, on the current device. Throws GpuError, or what `pause` throws.
  NcclCommunicator(const NcclApi& nccl, const NcclId& id, int rank, int size, const Pause& pause);
  ~NcclCommunicator();  // waits for nobody, unless it was closed

  const NcclApi& api() const { return nccl_; }
  NcclComm handle() const { return comm_; }

  // The calls of one group of collectives, which start together. On return all is in the stream.
  void group(const std::function<void()>& calls, const Pause& pause);

  // Throws GpuError with NCCL's own text.
  void check(int result, const char* call) const;

  // What went wrong since, on this rank or in the network; empty: nothing.
  std::string problem() const;

  // When all work is done, and all ranks do so.
  void close(const Pause& pause);

 private:
  void settle(const char* call, const Pause& pause) const;

  const NcclApi& nccl_;
  NcclComm comm_ = nullptr;
};

}  // namespace hvd
