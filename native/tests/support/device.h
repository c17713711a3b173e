// Tensors of a test on a GPU, or on the fake of tests/gpu: a stream as a framework has one,
// which is late with everything, and memory of the device.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <string>
#include <thread>

#include "core/base/settings.h"
#include "core/gpu/gpu.h"
#include "tests/support/check.h"

namespace hvd::test {

class Device {
 public:
  explicit Device(int rank) {
    CHECK(read_settings(&settings_).ok());
    std::string why;
    cuda_ = cuda_api(settings_, &why);
    CHECK_EQ(why, "");
    library_ = dlopen(cuda_->file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    int (*count)(int*);
    bind("cudaGetDeviceCount", &count);
    bind("cudaStreamSynchronize", &synchronize_);
    bind("cudaLaunchHostFunc", &launch_);
    bind("cudaMemsetAsync", &memset_);
    int devices = 0;
    cuda_->check(count(&devices), "cudaGetDeviceCount");
    number_ = rank % devices;
    const OnDevice here(*cuda_, number_);
    int (*create)(CudaStream*, unsigned);
    bind("cudaStreamCreateWithFlags", &create);
    cuda_->check(create(&stream_, kCudaStreamNonBlocking), "cudaStreamCreate");
  }

  ~Device() {
    if (kept_) return;
    cuda_->destroy_stream(stream_);
    const char* (*leaks)() = nullptr;
    bind("hvd_fake_cuda_leaks", &leaks);
    if (leaks) CHECK_EQ(std::string(leaks()), "");
  }

  const Settings& settings() const { return settings_; }  // where the libraries are
  const CudaApi& cuda() const { return *cuda_; }
  int number() const { return number_; }
  CudaStream stream() const { return stream_; }

  bool is_fake() const {
    const char* (*leaks)() = nullptr;
    bind("hvd_fake_cuda_leaks", &leaks);
    return leaks != nullptr;
  }

  // A test leaves an engine behind, and perhaps work in the streams.
  void keep() { kept_ = true; }

  template <typename Function>
  void bind(const char* name, Function** function) const {
    *function = reinterpret_cast<Function*>(dlsym(library_, name));
  }

  Memory allocate(size_t bytes) {
    const OnDevice here(*cuda_, number_);
    void* memory = nullptr;
    cuda_->check(cuda_->allocate(&memory, bytes ? bytes : 1), "cudaMalloc");
    return Memory(memory, [this](void* unused) { cuda_->free(unused); });
  }

  Memory pinned(size_t bytes) {
    const OnDevice here(*cuda_, number_);
    void* memory = nullptr;
    cuda_->check(cuda_->allocate_host(&memory, bytes ? bytes : 1, 0), "cudaHostAlloc");
    return Memory(memory, [this](void* unused) { cuda_->free_host(unused); });
  }

  // What the stream is given next comes this much later.
  void delay(std::chrono::microseconds time) {
    auto* const how_long = new std::chrono::microseconds(time);
    cuda_->check(launch_(
                     stream_,
                     [](void* data) {
                       auto* const how_long = static_cast<std::chrono::microseconds*>(data);
                       std::this_thread::sleep_for(*how_long);
                       delete how_long;
                     },
                     how_long),
                 "cudaLaunchHostFunc");
  }

  void copy(void* target, const void* source, size_t bytes) {
    if (bytes == 0) return;
    cuda_->check(cuda_->copy(target, source, bytes, kCudaMemcpyDefault, stream_),
                 "cudaMemcpyAsync");
  }

  void fill(void* target, int byte, size_t bytes) {
    if (bytes > 0) cuda_->check(memset_(target, byte, bytes, stream_), "cudaMemsetAsync");
  }

  void synchronize() { cuda_->check(synchronize_(stream_), "cudaStreamSynchronize"); }

 private:
  Settings settings_;
  const CudaApi* cuda_ = nullptr;
  void* library_ = nullptr;
  int (*synchronize_)(CudaStream) = nullptr;
  int (*launch_)(CudaStream, void (*)(void*), void*) = nullptr;
  int (*memset_)(void*, int, size_t, CudaStream) = nullptr;
  int number_ = 0;
  bool kept_ = false;
  CudaStream stream_ = nullptr;
};

}  // namespace hvd::test
