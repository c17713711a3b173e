// This rank's GPU as one process set uses it: a stream of ours, events that order it against the
// framework's, and memory.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/gpu/cuda_api.h"

namespace hvd {

// A point in the work of a stream. The last owner returns the event to a pool.
using Event = std::shared_ptr<CUevent_st>;
using Memory = std::shared_ptr<void>;

class Gpu {
 public:
  Gpu(const CudaApi& cuda, int device);
  ~Gpu();  // all work of the streams must be finished

  const CudaApi& cuda() const { return cuda_; }
  int device() const { return device_; }
  CudaStream stream() const { return stream_; }
  CudaStream back_stream();  // another one, for copies that shall not wait for those in the first

  // Marks the work enqueued in the stream (of this device) so far. From any thread.
  Event record(CudaStream stream);

  // Later work of the stream waits for the event.
  void wait(CudaStream stream, const Event& event);

  bool finished(const Event& event) const;

  // In our stream or another one; one of the two may be memory of the host.
  void copy(void* target, const void* source, size_t bytes, CudaStream stream = nullptr);

  // The last owner returns the memory to a pool: to free some lets the host wait for the GPU.
  Memory allocate(size_t bytes);  // of the device
  Memory pinned(size_t bytes);    // page-locked, of the host

  std::string bus_id() const;  // of the device: the same for all processes of this host

 private:
  using Blocks = std::vector<std::pair<size_t, void*>>;  // with their bytes

  // Outlives the Gpu while events or memory of it are owned.
  struct Store {
    explicit Store(const CudaApi& api) : cuda(api) {}
    ~Store();

    const CudaApi& cuda;
    std::mutex mutex;  // guards the members below
    std::vector<CudaEvent> events;
    Blocks of_device, of_host;
  };

  Memory take(Blocks Store::* pool, size_t bytes);

  const CudaApi& cuda_;
  const int device_;
  CudaStream create_stream() const;

  CudaStream stream_ = nullptr, back_stream_ = nullptr;
  const std::shared_ptr<Store> store_;
};

}  // namespace hvd
