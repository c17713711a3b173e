#include "core/gpu/cuda_api.h"

#include "core/base/settings.h"
#include "core/gpu/gpu_library.h"

namespace hvd {
namespace {

constexpr int kOldestCuda = 12000;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Opened<CudaApi> open(const Settings& settings) {
  // TensorFlow's own wheels come with CUDA 12, so that is asked for first.
  GpuLibrary library({"libcudart.so.12", "libcudart.so.13"}, settings.cudart_library,
                     "HVD_CUDART_LIBRARY");
  Opened<CudaApi> opened;
  CudaApi& api = opened.api;
  library.bind("cudaRuntimeGetVersion", &api.runtime_version);
  library.bind("cudaGetErrorString", &api.error_string);
  library.bind("cudaGetDevice", &api.get_device);
  library.bind("cudaSetDevice", &api.set_device);
  library.bind("cudaDeviceGetPCIBusId", &api.bus_id);
  library.bind("cudaDeviceGetStreamPriorityRange", &api.priorities);
  library.bind("cudaStreamCreateWithPriority", &api.create_stream);
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
  api.file = library.file();
  api.version = library.version(api.runtime_version, kOldestCuda, version_text);
  opened.problem = library.problem("CUDA's runtime library",
                                   "Install it, 'pip install hvd_keras[gpu]', or set "
                                   "HVD_CUDART_LIBRARY to your libcudart.so.12 or .13.");
  return opened;
}

}  // namespace

void CudaApi::check(int result, const char* call) const {
  if (result == kCudaSuccess) return;
  throw GpuError(std::string("CUDA refuses ") + call + ": " + error_string(result) + " (error " +
                 std::to_string(result) + ")");
}

const CudaApi* cuda_api(const Settings& settings, std::string* why) {
  static const auto* opened = new Opened<CudaApi>(open(settings));  // threads use it to the end
  return opened->get(why);
}

OnDevice::OnDevice(const CudaApi& cuda, int device) : cuda_(cuda) {
  cuda_.check(cuda_.get_device(&before_), "cudaGetDevice");
  if (before_ != device) cuda_.check(cuda_.set_device(device), "cudaSetDevice");
}

OnDevice::~OnDevice() { cuda_.set_device(before_); }

}  // namespace hvd
