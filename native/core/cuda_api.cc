#include "core/cuda_api.h"

#include "core/gpu_library.h"
#include "core/settings.h"

namespace hvd {
namespace {

constexpr int kOldestCuda = 12000;

struct Found {
  CudaApi api;
  std::string problem;
};

Found open(const Settings& settings) {
  // TensorFlow's own wheels come with CUDA 12, so that is asked for first.
  GpuLibrary library({"libcudart.so.12", "libcudart.so.13"}, settings.cudart_library,
                     "HVD_CUDART_LIBRARY");
  Found found;
  CudaApi& api = found.api;
  library.bind("cudaRuntimeGetVersion", &api.runtime_version);
  library.bind("cudaGetErrorString", &api.error_string);
  library.bind("cudaGetDevice", &api.get_device);
  library.bind("cudaSetDevice", &api.set_device);
  library.bind("cudaDeviceGetPCIBusId", &api.bus_id);
  library.bind("cudaStreamCreateWithFlags", &api.create_stream);
  library.bind("cudaStreamDestroy", &api.destroy_stream);
  library.bind("cudaStreamWaitEvent", &api.stream_wait);
  library.bind("cudaEventCreateWithFlags", &api.create_event);
  library.bind("cudaEventDestroy", &api.destroy_event);
  library.bind("cudaEventRecord", &api.record_event);
  library.bind("cudaEventQuery", &api.query_event);
  library.bind("cudaMemcpyAsync", &api.copy);
  library.bind("cudaMalloc", &api.allocate);
  library.bind("cudaFree", &api.free);
  library.bind("cudaHostAlloc", &api.allocate_host);
  library.bind("cudaFreeHost", &api.free_host);
  found.problem = library.problem();
  api.file = library.file();
  if (found.problem.empty() && api.runtime_version(&api.version) != kCudaSuccess)
    found.problem = "it does not tell its version";
  if (found.problem.empty() && api.version < kOldestCuda) {
    found.problem = "it is version " + std::to_string(api.version / 1000) + "." +
                    std::to_string(api.version % 1000 / 10) + ", expected 12 or later";
  }
  if (!found.problem.empty()) {
    found.problem = "CUDA's runtime library" + (api.file.empty() ? "" : " " + api.file) +
                    " cannot be used: " + found.problem +
                    ". Install it, 'pip install hvd_keras[gpu]', or set HVD_CUDART_LIBRARY to "
                    "your libcudart.so.12 or .13.";
  }
  return found;
}

}  // namespace

void CudaApi::check(int result, const char* call) const {
  if (result == kCudaSuccess) return;
  throw GpuError(std::string("CUDA refuses ") + call + ": " + error_string(result) + " (error " +
                 std::to_string(result) + ")");
}

const CudaApi* cuda_api(const Settings& settings, std::string* why) {
  static const Found* found = new Found(open(settings));  // threads use it to the end
  *why = found->problem;
  return found->problem.empty() ? &found->api : nullptr;
}

OnDevice::OnDevice(const CudaApi& cuda, int device) : cuda_(cuda) {
  cuda_.check(cuda_.get_device(&before_), "cudaGetDevice");
  if (before_ != device) cuda_.check(cuda_.set_device(device), "cudaSetDevice");
}

OnDevice::~OnDevice() { cuda_.set_device(before_); }

}  // namespace hvd
