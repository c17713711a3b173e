// What PyTorch calls besides, in a process that has the fake by LD_PRELOAD, to have tensors on a
// device and to copy them. Its kernels fail: there is nothing that they could run on.
#include <cstring>
#include <set>
#include <vector>

#include "fake_cuda.h"

EXPORT int cudaEventRecord(void*, CUstream_st*);
EXPORT int cudaMalloc(void**, size_t);

// Of CUDA 13.
struct DeviceProperties {
  char name[256], ids[32];
  size_t bytes, bytes_per_block;
  int registers, warp, others[10];
  size_t constant_bytes;
  int major, minor;
  size_t alignments[2];
  int processors;
};

EXPORT int cudaGetDeviceProperties(DeviceProperties* properties, int) {
  std::strcpy(properties->name, "a fake");
  properties->bytes = size_t{1} << 32;
  properties->warp = 32;
  properties->major = 9;
  properties->minor = 0;
  properties->processors = 1;
  return 0;
}

EXPORT int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

EXPORT const char* cudaGetErrorName(int) { return "cudaErrorOfTheFake"; }

EXPORT int cudaGetLastError() { return 0; }

EXPORT int cudaPeekAtLastError() { return 0; }

EXPORT int cudaDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return 0;
}

EXPORT int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}

// Nothing is captured as a graph.
EXPORT int cudaStreamIsCapturing(CUstream_st*, int* is) {
  *is = 0;
  return 0;
}

EXPORT int cudaStreamGetCaptureInfo(CUstream_st*, int* is, ...) {
  *is = 0;
  return 0;
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }

EXPORT int cudaEventRecordWithFlags(void* event, CUstream_st* stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned*, int* is_active) {
  *is_active = 1;
  return 0;
}

// An allocator for torch.cuda.memory.CUDAPluggableAllocator. As PyTorch's own, it gives memory that
// was freed to the next tensor of its stream at once; but to none if record_stream() has named
// another stream, and no two tensors share what the fake sees as one piece of memory.
namespace {
std::map<std::pair<CUstream_st*, size_t>, std::vector<void*>>& unused() {
  static auto* pieces = new std::map<std::pair<CUstream_st*, size_t>, std::vector<void*>>();
  return *pieces;
}

std::map<void*, CUstream_st*>& streams() {
  static auto* streams = new std::map<void*, CUstream_st*>();
  return *streams;
}

// By streams of which the allocator does not know.
std::set<void*>& used() {
  static auto* used = new std::set<void*>();
  return *used;
}
}  // namespace

EXPORT void* hvd_fake_cuda_torch_allocate(size_t bytes, int, CUstream_st* stream) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  void* data = nullptr;
  std::vector<void*>& free = unused()[{stream, bytes}];
  if (free.empty()) {
    cudaMalloc(&data, bytes);
  } else {
    data = free.back();
    free.pop_back();
  }
  streams()[data] = stream;
  return data;
}

EXPORT void hvd_fake_cuda_torch_record(void* data, CUstream_st* stream) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (data && streams().at(data) != stream) used().insert(data);
}

EXPORT void hvd_fake_cuda_torch_free(void* data, size_t bytes, int, CUstream_st* stream) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (!used().count(data)) unused()[{stream, bytes}].push_back(data);
}
