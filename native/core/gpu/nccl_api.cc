#include "core/gpu/nccl_api.h"

#include "core/base/settings.h"

namespace hvd {
namespace {

// The first with all members of NcclConfig; non-blocking communicators came with 2.14.
constexpr int kOldestNccl = 21700;

}  // namespace

NcclApi::NcclApi(const Settings& settings)
    : library({"libnccl.so.2", "librccl.so.1"}, settings.nccl_library, "HVD_NCCL_LIBRARY") {
  file = library.file();
  version = library.version(get_version, kOldestNccl, nccl_version_text);
  problem = library.problem("NCCL",
                            "Install it, 'pip install nvidia-nccl-cu12' (with CUDA 13: "
                            "nvidia-nccl-cu13), or set HVD_NCCL_LIBRARY to your libnccl.so.2.");
}

const NcclApi* nccl_api(const Settings& settings, std::string* why) {
  static const auto* api = new NcclApi(settings);  // threads use it to the end
  *why = api->problem;
  return why->empty() ? api : nullptr;
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

int nccl_dtype(DType dtype) {
#define HVD_NUMBER(dtype, name, bytes, type, tensorflow, xla, number) number,
  static constexpr int kNumbers[] = {HVD_DTYPES(HVD_NUMBER)};
  return kNumbers[static_cast<int>(dtype)];
}

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
