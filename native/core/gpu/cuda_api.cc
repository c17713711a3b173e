#include "core/gpu/cuda_api.h"

#include "core/base/settings.h"

namespace hvd {
namespace {

constexpr int kOldestCuda = 12000;  // each version of HIP is a larger number

}  // namespace

// TensorFlow's own wheels come with CUDA 12, so that is asked for first; then AMD's HIP.
CudaApi::CudaApi(const Settings& settings)
    : library({"libcudart.so.12", "libcudart.so.13", "libamdhip64.so.6", "libamdhip64.so.7"},
              settings.cudart_library, "HVD_CUDART_LIBRARY") {
  file = library.file();
  version = library.version(runtime_version, kOldestCuda, cuda_version_text);
  problem = library.problem("CUDA's runtime library",
                            "Install it, 'pip install hvd_keras[gpu]', or set "
                            "HVD_CUDART_LIBRARY to your libcudart.so.12 or .13.");
}

std::string cuda_version_text(int version) {
  if (version >= 10000000) {  // HIP: 10000000 × major + 100000 × minor + patch
    return "HIP " + std::to_string(version / 10000000) + "." +
           std::to_string(version % 10000000 / 100000);
  }
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void CudaApi::check(int result, const char* call) const {
  if (result == kCudaSuccess) return;
  throw GpuError(std::string("CUDA refuses ") + call + ": " + error_string(result) + " (error " +
                 std::to_string(result) + ")");
}

const CudaApi* cuda_api(const Settings& settings, std::string* why) {
  static const auto* api = new CudaApi(settings);  // threads use it to the end
  *why = api->problem;
  return why->empty() ? api : nullptr;
}

OnDevice::OnDevice(const CudaApi& cuda, int device) : cuda_(cuda), device_(device) {
  cuda_.check(cuda_.get_device(&before_), "cudaGetDevice");
  if (before_ != device) cuda_.check(cuda_.set_device(device), "cudaSetDevice");
}

OnDevice::~OnDevice() {
  if (before_ != device_) cuda_.set_device(before_);
}

}  // namespace hvd
