#include "core/gpu/nccl_api.h"

#include <atomic>
#include <exception>
#include <memory>

#include "core/base/settings.h"
#include "core/base/threads.h"

namespace hvd {
namespace {

// The first with all members of NcclConfig; non-blocking communicators came with 2.14.
constexpr int kOldestNccl = 21700;

// A call that takes longer may wait for another rank.
constexpr double kLongCallSeconds = 0.1;

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

CallWatch::CallWatch() : thread_(new_thread("hvd nccl watch", [this] { watch(); })) {}

CallWatch::~CallWatch() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

CallWatch::Call::Call(CallWatch& watch, const Pause& pause) : watch_(watch) {
  std::lock_guard<std::mutex> lock(watch_.mutex_);
  watch_.pause_ = &pause;
  watch_.since_ = Clock::now();
}

CallWatch::Call::~Call() {
  std::lock_guard<std::mutex> lock(watch_.mutex_);
  watch_.pause_ = nullptr;
}

// The lock is held while `pause` runs, so a call that returns meanwhile waits for it.
void CallWatch::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ended_.wait_for(lock, Seconds(kLongCallSeconds), [this] { return over_; })) {
    if (!pause_ || seconds_since(since_) < kLongCallSeconds) continue;
    try {
      (*pause_)();
    } catch (const std::exception&) {  // all ranks are told already
      pause_ = nullptr;
    }
  }
}

NcclCommunicator::NcclCommunicator(const NcclApi& nccl, const CudaApi& cuda, int device,
                                   const NcclId& id, int rank, int size, const Pause& pause)
    : nccl_(nccl) {
  enum State { under_way, ended, given_up };
  struct Creation {
    NcclComm comm = nullptr;
    int result = kNcclSuccess;
    std::atomic<State> state{under_way};
  };
  const auto creation = std::make_shared<Creation>();
  new_thread("hvd nccl init", [creation, &nccl, &cuda, device, id, rank, size] {
    cuda.set_device(device);
    NcclConfig config;
    creation->result = nccl.init_rank(&creation->comm, size, id, rank, &config);
    const bool in_vain = creation->state.exchange(ended) == given_up;
    if (in_vain && creation->comm) nccl.abort(creation->comm);
  }).detach();
  try {
    while (creation->state != ended) pause();
  } catch (...) {
    if (creation->state.exchange(given_up) == ended && creation->comm) nccl.abort(creation->comm);
    throw;
  }
  check(creation->result, "ncclCommInitRankConfig");
  comm_ = creation->comm;
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_) nccl_.abort(comm_);
}

void NcclCommunicator::group(const std::function<void()>& calls, const Pause& pause) {
  const CallWatch::Call call(watch_, pause);
  check(nccl_.group_start(), "ncclGroupStart");
  ++groups_;
  calls();  // if it throws, the thread ends, and with it the group
  check(nccl_.group_end(), "ncclGroupEnd");
}

void NcclCommunicator::check(int result, const char* call) const {
  if (result == kNcclSuccess) return;
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

void NcclCommunicator::close() {
  check(nccl_.finalize(comm_), "ncclCommFinalize");
  check(nccl_.destroy(comm_), "ncclCommDestroy");
  comm_ = nullptr;
}

}  // namespace hvd
