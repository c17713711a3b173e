// What we use of CUDA's runtime library, by the C interface that NVIDIA documents
// (https://docs.nvidia.com/cuda/cuda-runtime-api). Loaded at run time, so that building needs no
// CUDA.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

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
  std::string file;
  int version = 0;  // 1000 × major + 10 × minor

  int (*runtime_version)(int*);
  const char* (*error_string)(int);
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*bus_id)(char*, int, int);
  int (*priorities)(int*, int*);  // the least and the greatest
  int (*create_stream)(CudaStream*, unsigned, int);
  int (*destroy_stream)(CudaStream);
  int (*stream_wait)(CudaStream, CudaEvent, unsigned);
  int (*create_event)(CudaEvent*, unsigned);
  int (*destroy_event)(CudaEvent);
  int (*record_event)(CudaEvent, CudaStream);
  int (*query_event)(CudaEvent);
  int (*copy)(void*, const void*, size_t, int, CudaStream);
  int (*allocate)(void**, size_t);
  int (*free)(void*);
  int (*allocate_host)(void**, size_t, unsigned);
  int (*free_host)(void*);

  // Throws GpuError unless the result is kCudaSuccess.
  void check(int result, const char* call) const;
};

// CUDA or NCCL failed. Started work may never finish.
class GpuError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

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
  int before_ = 0;
};

}  // namespace hvd
