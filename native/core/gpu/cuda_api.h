// What we use of CUDA's runtime library, by the C interface that NVIDIA documents
// (https://docs.nvidia.com/cuda/cuda-runtime-api), or of AMD's HIP, which has the same functions
// and numbers. Loaded at run time, so that building needs neither.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "core/gpu/gpu_library.h"

struct CUstream_st;
struct CUevent_st;

namespace hvd {

struct Settings;

using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;

constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1;  // does not wait for the default stream
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr int kCudaMemcpyDefault = 4;  // the direction follows from the addresses

struct CudaApi {
  explicit CudaApi(const Settings& settings);

  GpuLibrary library;  // gives the functions
  std::string file;
  std::string problem;  // why it cannot be used, and what to do; empty: it can
  int version = 0;      // 1000 × major + 10 × minor, or HIP's

  int (*runtime_version)(int*) = library["cudaRuntimeGetVersion"];
  const char* (*error_string)(int) = library["cudaGetErrorString"];
  int (*get_device)(int*) = library["cudaGetDevice"];
  int (*set_device)(int) = library["cudaSetDevice"];
  int (*bus_id)(char*, int, int) = library["cudaDeviceGetPCIBusId"];
  int (*priorities)(int*, int*) =
      library["cudaDeviceGetStreamPriorityRange"];  // the least and the greatest
  int (*create_stream)(CudaStream*, unsigned, int) = library["cudaStreamCreateWithPriority"];
  int (*destroy_stream)(CudaStream) = library["cudaStreamDestroy"];
  int (*stream_wait)(CudaStream, CudaEvent, unsigned) = library["cudaStreamWaitEvent"];
  int (*create_event)(CudaEvent*, unsigned) = library["cudaEventCreateWithFlags"];
  int (*destroy_event)(CudaEvent) = library["cudaEventDestroy"];
  int (*record_event)(CudaEvent, CudaStream) = library["cudaEventRecord"];
  int (*query_event)(CudaEvent) = library["cudaEventQuery"];
  int (*copy)(void*, const void*, size_t, int, CudaStream) = library["cudaMemcpyAsync"];
  int (*allocate)(void**, size_t) = library["cudaMalloc"];
  int (*free)(void*) = library["cudaFree"];
  int (*allocate_host)(void**, size_t, unsigned) = library["cudaHostAlloc"];
  int (*free_host)(void*) = library["cudaFreeHost"];

  // Throws GpuError unless the result is kCudaSuccess.
  void check(int result, const char* call) const;
};

// CUDA or NCCL failed. Started work may never finish.
class GpuError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::string cuda_version_text(int version);

// Null if it cannot be loaded; `why` then says why and what to do. The first call loads it.
const CudaApi* cuda_api(const Settings& settings, std::string* why);

// Selects a device for this thread's CUDA calls in its scope.
class OnDevice {
 public:
  OnDevice(const CudaApi& cuda, int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const CudaApi& cuda_;
  const int device_;
  int before_ = 0;
};

}  // namespace hvd
