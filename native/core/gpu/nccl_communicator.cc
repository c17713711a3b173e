#include "core/gpu/nccl_communicator.h"

namespace hvd {

NcclCommunicator::NcclCommunicator(const NcclApi& nccl, const NcclId& id, int rank, int size,
                                   const Pause& pause)
    : nccl_(nccl) {
  NcclConfig config;
  config.blocking = 0;
  try {
    check(nccl_.init_rank(&comm_, size, id, rank, &config), "ncclCommInitRankConfig");
    settle("ncclCommInitRankConfig", pause);
  } catch (...) {
    if (comm_) nccl_.abort(comm_);
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_) nccl_.abort(comm_);
}

void NcclCommunicator::group(const std::function<void()>& calls, const Pause& pause) {
  check(nccl_.group_start(), "ncclGroupStart");
  ++groups_;
  calls();  // if it throws, the thread ends, and with it the group
  check(nccl_.group_end(), "ncclGroupEnd");
  settle("ncclGroupEnd", pause);
}

void NcclCommunicator::check(int result, const char* call) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  const char* detail = nccl_.last_error(comm_);
  throw GpuError(std::string("NCCL refuses ") + call + ": " + nccl_.error_string(result) +
                 (detail && *detail ? std::string(" (") + detail + ")" : "") +
                 ". Set NCCL_DEBUG=INFO for details.");
}

std::string NcclCommunicator::problem() const {
  int state = kNcclSuccess;
  try {
    check(nccl_.async_error(comm_, &state), "ncclCommGetAsyncError");
    check(state, "what it had begun");
  } catch (const GpuError& error) {
    return error.what();
  }
  return "";
}

void NcclCommunicator::close(const Pause& pause) {
  check(nccl_.finalize(comm_), "ncclCommFinalize");
  settle("ncclCommFinalize", pause);
  check(nccl_.destroy(comm_), "ncclCommDestroy");
  comm_ = nullptr;
}

void NcclCommunicator::settle(const char* call, const Pause& pause) const {
  while (true) {
    int state = kNcclSuccess;
    check(nccl_.async_error(comm_, &state), "ncclCommGetAsyncError");
    check(state, call);
    if (state == kNcclSuccess) return;
    pause();
  }
}

}  // namespace hvd
