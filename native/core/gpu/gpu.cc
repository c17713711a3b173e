#include "core/gpu/gpu.h"

#include <algorithm>

namespace hvd {
namespace {

// Blocks of powers of two are used again more often, and page-locking is slow.
size_t rounded(size_t bytes) {
  size_t size = 4096;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

Gpu::Store::~Store() {
  for (CudaEvent event : events) cuda.destroy_event(event);
  for (const auto& [bytes, block] : of_device) cuda.free(block);
  for (const auto& [bytes, block] : of_host) cuda.free_host(block);
}

Gpu::Gpu(const CudaApi& cuda, int device)
    : cuda_(cuda), device_(device), store_(std::make_shared<Store>(cuda)) {
  stream_ = create_stream();
}

Gpu::~Gpu() {
  cuda_.destroy_stream(stream_);
  if (back_stream_) cuda_.destroy_stream(back_stream_);
}

CudaStream Gpu::create_stream() const {
  const OnDevice here(cuda_, device_);
  int least, greatest;
  cuda_.check(cuda_.priorities(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  // Before the framework's kernels, behind which a collective would keep the other ranks waiting.
  CudaStream stream = nullptr;
  cuda_.check(cuda_.create_stream(&stream, kCudaStreamNonBlocking, greatest),
              "cudaStreamCreateWithPriority");
  return stream;
}

CudaStream Gpu::back_stream() {
  if (!back_stream_) back_stream_ = create_stream();
  return back_stream_;
}

Event Gpu::record(CudaStream stream) {
  CudaEvent event = nullptr;
  {
    std::lock_guard<std::mutex> lock(store_->mutex);
    if (!store_->events.empty()) {
      event = store_->events.back();
      store_->events.pop_back();
    }
  }
  const OnDevice here(cuda_, device_);
  if (!event) {
    cuda_.check(cuda_.create_event(&event, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  const Event owned(event, [store = store_](CudaEvent unused) {
    std::lock_guard<std::mutex> lock(store->mutex);
    store->events.push_back(unused);
  });
  cuda_.check(cuda_.record_event(event, stream), "cudaEventRecord");
  return owned;
}

void Gpu::wait(CudaStream stream, const Event& event) {
  const OnDevice here(cuda_, device_);
  cuda_.check(cuda_.stream_wait(stream, event.get(), 0), "cudaStreamWaitEvent");
}

bool Gpu::finished(const Event& event) const {
  const int result = cuda_.query_event(event.get());
  if (result == kCudaNotReady) return false;
  cuda_.check(result, "cudaEventQuery");
  return true;
}

void Gpu::copy(void* target, const void* source, size_t bytes, CudaStream stream) {
  if (bytes == 0) return;
  const OnDevice here(cuda_, device_);
  cuda_.check(cuda_.copy(target, source, bytes, kCudaMemcpyDefault, stream ? stream : stream_),
              "cudaMemcpyAsync");
}

Memory Gpu::allocate(size_t bytes) { return take(&Store::of_device, bytes); }

Memory Gpu::pinned(size_t bytes) { return take(&Store::of_host, bytes); }

Memory Gpu::take(Blocks Store::* pool, size_t bytes) {
  const size_t size = rounded(bytes);
  void* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(store_->mutex);
    Blocks& blocks = (*store_).*pool;
    const auto found = std::find_if(blocks.begin(), blocks.end(),
                                    [&](const auto& entry) { return entry.first == size; });
    if (found != blocks.end()) {
      block = found->second;
      blocks.erase(found);
    }
  }
  const OnDevice here(cuda_, device_);
  if (!block && pool == &Store::of_device) {
    cuda_.check(cuda_.allocate(&block, size), "cudaMalloc");
  } else if (!block) {
    cuda_.check(cuda_.allocate_host(&block, size, 0), "cudaHostAlloc");
  }
  return Memory(block, [store = store_, pool, size](void* unused) {
    std::lock_guard<std::mutex> lock(store->mutex);
    ((*store).*pool).emplace_back(size, unused);
  });
}

std::string Gpu::bus_id() const {
  char text[32] = "";
  cuda_.check(cuda_.bus_id(text, sizeof text, device_), "cudaDeviceGetPCIBusId");
  return text;
}

}  // namespace hvd
