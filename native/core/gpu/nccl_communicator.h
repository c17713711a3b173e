// A non-blocking NCCL communicator of the ranks of a process set. Waits are polls with a pause
// between them, in which the caller may abort.
#pragma once

#include <functional>
#include <string>

#include "core/gpu/nccl_api.h"

namespace hvd {

// Called between two polls; throws to end the wait.
using Pause = std::function<void()>;

class NcclCommunicator {
 public:
  // Collective, on the current device. Throws GpuError, or what `pause` throws.
  NcclCommunicator(const NcclApi& nccl, const NcclId& id, int rank, int size, const Pause& pause);
  ~NcclCommunicator();  // aborts unfinished work, unless close() was called

  const NcclApi& api() const { return nccl_; }
  NcclComm handle() const { return comm_; }

  // Runs NCCL calls as one group. On return all of it is enqueued in the stream. If it throws, the
  // thread must call NCCL no more: its group may be open.
  void group(const std::function<void()>& calls, const Pause& pause);

  // How many groups have been begun. If one fails, a part of it may be enqueued.
  uint64_t groups() const { return groups_; }

  // Throws GpuError with NCCL's own text.
  void check(int result, const char* call) const;

  // An asynchronous error of this rank or of the network, or "".
  std::string problem() const;

  // Collective, after all work is finished.
  void close(const Pause& pause);

 private:
  void settle(const char* call, const Pause& pause) const;

  const NcclApi& nccl_;
  NcclComm comm_ = nullptr;
  uint64_t groups_ = 0;
};

}  // namespace hvd
