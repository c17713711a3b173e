// XLA's own compiler and runtime for GPUs over the fake for CUDA: compiles for an H100 what
// TensorFlow has lowered, and executes it. What would need a kernel of the GPU cannot run, that is
// all computations; collectives, copies and constants can. xla.py calls this.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/backends/gpu/target_config/target_config.h"
#include "xla/debug_options_flags.h"
#include "xla/executable_run_options.h"
#include "xla/hlo/ir/hlo_module.h"
#include "xla/service/compiler.h"
#include "xla/service/executable.h"
#include "xla/service/gpu/gpu_executable_run_options.h"
#include "xla/service/gpu_topology.h"
#include "xla/service/service_executable_run_options.h"
#include "xla/service/shaped_buffer.h"
#include "xla/stream_executor/cuda/cuda_platform_id.h"
#include "xla/stream_executor/device_address_allocator.h"
#include "xla/stream_executor/stream_common.h"
#include "xla/stream_executor/stream_executor_common.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct CUstream_st;

namespace {

namespace se = stream_executor;
using se::DeviceAddressBase;

// The fake's. TensorFlow has functions of the same names, which a linker would find first.
struct Cuda {
  int (*cudaSetDevice)(int);
  int (*cudaStreamCreateWithFlags)(CUstream_st**, unsigned);
  int (*cudaStreamDestroy)(CUstream_st*);
  int (*cudaStreamSynchronize)(CUstream_st*);
  int (*cudaMalloc)(void**, size_t);
  int (*cudaFree)(void*);
  int (*cudaHostAlloc)(void**, size_t, unsigned);
  int (*cudaFreeHost)(void*);
  int (*cudaMemcpyAsync)(void*, const void*, size_t, int, CUstream_st*);
  int (*cudaMemsetAsync)(void*, int, size_t, CUstream_st*);
  int (*cudaLaunchHostFunc)(CUstream_st*, void (*)(void*), void*);
};
Cuda cuda;

absl::Status not_here(const char* what) {
  return absl::UnimplementedError(std::string("the fake for a GPU has no ") + what);
}

// Of a result of CUDA's.
absl::Status checked(int result) {
  if (result == 0) return absl::OkStatus();
  return absl::InternalError("the fake returned " + std::to_string(result));
}

xla::gpu::GpuTargetConfig target() {
  const auto model = xla::gpu::GetGpuTargetConfig(xla::gpu::GpuModel::H100_SXM);
  auto target = xla::gpu::GpuTargetConfig::FromProto(model.value()).value();
  const se::SemanticVersion version(12, 9, 0);  // one with which XLA makes CUDA graphs
  target.device_description.set_driver_version(version);
  target.device_description.set_runtime_version(version);
  target.device_description.set_compile_time_toolkit_version(version);
  return target;
}

class Platform : public se::Platform {
 public:
  Id id() const override { return se::cuda::kCudaPlatformId; }
  const std::string& Name() const override { return name_; }
  int VisibleDeviceCount() const override { return 2; }
  absl::StatusOr<std::unique_ptr<se::DeviceDescription>> DescriptionForDevice(int) const override {
    return std::make_unique<se::DeviceDescription>(target().device_description);
  }
  absl::StatusOr<se::StreamExecutor*> ExecutorForDevice(int) override {
    return not_here("executors by number");
  }

 private:
  const std::string name_ = "CUDA";
};

class Stream : public se::StreamCommon {
 public:
  explicit Stream(se::StreamExecutor* executor) : StreamCommon(executor) {
    cuda.cudaSetDevice(executor->device_ordinal());
    cuda.cudaStreamCreateWithFlags(&stream_, 1);
  }
  ~Stream() override { cuda.cudaStreamDestroy(stream_); }

  CUstream_st* get() const { return stream_; }

  PlatformSpecificHandle platform_specific_handle() const override { return {stream_}; }
  absl::Status Memcpy(void* target, const DeviceAddressBase& source, uint64_t bytes) override {
    return copy(target, source.opaque(), bytes);
  }
  absl::Status Memcpy(DeviceAddressBase* target, const void* source, uint64_t bytes) override {
    return copy(target->opaque(), source, bytes);
  }
  absl::Status Memcpy(DeviceAddressBase* target, const DeviceAddressBase& source,
                      uint64_t bytes) override {
    return copy(target->opaque(), source.opaque(), bytes);
  }
  absl::Status MemZero(DeviceAddressBase* target, uint64_t bytes) override {
    return checked(cuda.cudaMemsetAsync(target->opaque(), 0, bytes, stream_));
  }
  absl::Status BlockHostUntilDone() override {
    return checked(cuda.cudaStreamSynchronize(stream_));
  }

  absl::Status WaitFor(se::Stream*) override { return not_here("second stream"); }
  absl::Status WaitFor(se::Event*) override { return not_here("events for XLA"); }
  absl::Status RecordEvent(se::Event*) override { return not_here("events for XLA"); }
  absl::Status DoHostCallbackWithStatus(absl::AnyInvocable<absl::Status() &&>) override {
    return not_here("callbacks for XLA");
  }

 private:
  absl::Status copy(void* target, const void* source, uint64_t bytes) {
    return checked(cuda.cudaMemcpyAsync(target, source, bytes, 4, stream_));
  }

  CUstream_st* stream_ = nullptr;
};

class Executor : public se::StreamExecutorCommon {
 public:
  Executor(const Platform* platform, int device)
      : StreamExecutorCommon(platform), device_(device), chain_(Allocate(sizeof(float), 0)) {
    CUstream_st* stream = nullptr;
    cuda.cudaStreamCreateWithFlags(&stream, 1);
    cuda.cudaMemsetAsync(chain_.opaque(), 0, sizeof(float), stream);
    cuda.cudaStreamSynchronize(stream);
    cuda.cudaStreamDestroy(stream);
  }
  ~Executor() override { Deallocate(&chain_); }

  int device_ordinal() const override { return device_; }
  absl::Status Init() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<se::DeviceDescription>> CreateDeviceDescription() const override {
    return GetPlatform()->DescriptionForDevice(device_);
  }
  // The code has the constants, here one: the zero at the beginning of the chain.
  absl::StatusOr<se::ModuleHandle> LoadModule(const se::MultiModuleLoaderSpec&) override {
    return se::ModuleHandle(this);
  }
  bool UnloadModule(se::ModuleHandle) override { return true; }
  absl::StatusOr<DeviceAddressBase> GetSymbol(const std::string& name, se::ModuleHandle) override {
    if (name.find("_Hvd") == std::string::npos) return not_here("constants of computations");
    return chain_;
  }
  DeviceAddressBase Allocate(uint64_t bytes, int64_t) override {
    cuda.cudaSetDevice(device_);
    void* memory = nullptr;
    cuda.cudaMalloc(&memory, bytes);
    return DeviceAddressBase(memory, bytes);
  }
  void Deallocate(DeviceAddressBase* memory) override { cuda.cudaFree(memory->opaque()); }

  absl::StatusOr<std::unique_ptr<se::CommandBuffer>> CreateCommandBuffer(
      se::CommandBuffer::Mode) override {
    return not_here("command buffers");
  }
  absl::StatusOr<std::unique_ptr<se::Kernel>> LoadKernel(const se::KernelLoaderSpec&) override {
    return not_here("kernels");
  }
  absl::StatusOr<std::unique_ptr<se::Stream>> CreateStream(
      std::optional<std::variant<se::StreamPriority, int>>) override {
    return not_here("second stream");
  }
  absl::StatusOr<std::unique_ptr<se::Event>> CreateEvent() override {
    return not_here("events for XLA");
  }
  absl::StatusOr<std::unique_ptr<se::MemoryAllocation>> HostMemoryAllocate(uint64_t) override {
    return not_here("memory of the host");
  }
  bool SynchronizeAllActivity() override { return false; }
  absl::Status SynchronousMemZero(DeviceAddressBase*, uint64_t) override {
    return not_here("synchronous work");
  }
  absl::Status SynchronousMemcpy(DeviceAddressBase*, const void*, uint64_t) override {
    return not_here("synchronous work");
  }
  absl::Status SynchronousMemcpy(void*, const DeviceAddressBase&, uint64_t) override {
    return not_here("synchronous work");
  }
  void DeallocateStream(se::Stream*) override {}
  absl::Status EnablePeerAccessTo(se::StreamExecutor*) override { return not_here("peers"); }
  bool CanEnablePeerAccessTo(se::StreamExecutor*) override { return false; }

 private:
  const int device_;
  DeviceAddressBase chain_;
};

// Keeps all memory until the program is forgotten: XLA gives it back while its stream still uses
// it, which TensorFlow's allocator allows, and forgets some when it fails.
class Allocator : public se::DeviceAddressAllocator {
 public:
  explicit Allocator(Executor* executor)
      : DeviceAddressAllocator(executor->GetPlatform()), executor_(executor) {}
  ~Allocator() override {
    for (DeviceAddressBase& memory : memory_) executor_->Deallocate(&memory);
  }

  uint64_t bytes() const { return bytes_; }

  absl::StatusOr<se::ScopedDeviceAddress<uint8_t>> Allocate(int device, uint64_t bytes, bool,
                                                            int64_t) override {
    bytes_ += bytes;
    memory_.push_back(executor_->Allocate(bytes, 0));
    return se::ScopedDeviceAddress<uint8_t>(memory_.back(), device, this);
  }
  absl::Status Deallocate(int, DeviceAddressBase) override { return absl::OkStatus(); }
  bool AllowsAsynchronousDeallocation() const override { return true; }
  absl::StatusOr<se::Stream*> GetStream(int) override { return not_here("second stream"); }

 private:
  Executor* const executor_;
  uint64_t bytes_ = 0;
  std::vector<DeviceAddressBase> memory_;
};

struct Program {
  explicit Program(int device) : executor(&platform, device), allocator(&executor) {}
  ~Program() {
    for (void* memory : pinned) cuda.cudaFreeHost(memory);
  }

  absl::Status compile(const std::string& text);
  absl::Status start(const void* const* given);
  absl::Status finish(void* const* taken, const size_t* bytes);

  Platform platform;
  Executor executor;
  Stream stream{&executor};
  Allocator allocator;
  std::unique_ptr<xla::Executable> executable;
  std::unique_ptr<xla::ScopedShapedBuffer> results;
  std::vector<void*> pinned;  // the arguments: a copy of pageable memory would wait for the stream
  std::atomic<bool> held{false};
};

absl::Status Program::compile(const std::string& text) {
  xla::HloModuleProto proto;
  if (!proto.ParseFromString(text)) return absl::InvalidArgumentError("this is no HloModuleProto");
  auto config = xla::HloModule::CreateModuleConfigFromProto(proto, xla::GetDebugOptionsFromFlags());
  if (!config.ok()) return config.status();
  auto lowered = xla::HloModule::CreateFromProto(proto, *config);
  if (!lowered.ok()) return lowered.status();
  const auto compiler = xla::Compiler::GetForPlatform(platform.id());
  if (!compiler.ok()) return compiler.status();
  xla::Compiler::CompileOptions options;
  options.gpu_topology = xla::GetSingleDeviceGpuTopology("CUDA", target());
  auto module = (*compiler)->RunHloPasses(std::move(*lowered), nullptr, options);
  if (!module.ok()) return module.status();
  auto made = (*compiler)->RunBackend(std::move(*module), nullptr, options);
  if (!made.ok()) return made.status();
  executable = std::move(*made);
  return absl::OkStatus();
}

// Gives the stream copies of the arguments, and then the program.
absl::Status Program::start(const void* const* given) {
  const int device = executor.device_ordinal();
  std::vector<xla::ScopedShapedBuffer> arguments;
  for (const xla::ShapeLayout& layout :
       executable->module_config().entry_computation_layout().parameter_layouts()) {
    const xla::Shape& shape = layout.shape();
    xla::ScopedShapedBuffer& buffer = arguments.emplace_back(shape, &allocator, device);
    const uint64_t bytes = xla::ShapeUtil::ByteSizeOf(shape);
    auto memory = allocator.Allocate(device, bytes, false, 0);
    if (!memory.ok()) return memory.status();
    DeviceAddressBase address = memory->cref();
    buffer.set_buffer(std::move(*memory), {});
    void*& argument = pinned.emplace_back(nullptr);
    if (auto status = checked(cuda.cudaHostAlloc(&argument, bytes, 0)); !status.ok()) return status;
    std::memcpy(argument, given[arguments.size() - 1], bytes);
    if (auto status = stream.Memcpy(&address, argument, bytes); !status.ok()) return status;
  }
  std::vector<const xla::ShapedBuffer*> pointers;
  for (const auto& argument : arguments) pointers.push_back(&argument);
  xla::gpu::GpuExecutableRunOptions of_gpu;
  xla::ExecutableRunOptions options;
  options.set_stream(&stream)
      .set_allocator(&allocator)
      .set_device_ordinal(device)
      .set_local_device_count(1)
      .set_gpu_executable_run_options(&of_gpu);
  const xla::ServiceExecutableRunOptions run_options(options);
  auto made = executable->ExecuteAsyncOnStream(&run_options, pointers);
  if (!made.ok()) return made.status();
  results = std::make_unique<xla::ScopedShapedBuffer>(std::move(*made));
  return absl::OkStatus();
}

// Copies the results in the same stream, and only then waits.
absl::Status Program::finish(void* const* taken, const size_t* bytes) {
  size_t next = 0;
  for (const auto& [index, memory] : results->buffers().leaves()) {
    if (memory.size() != bytes[next])
      return absl::InvalidArgumentError("a result has another size");
    const auto status = stream.Memcpy(taken[next++], memory, memory.size());
    if (!status.ok()) return status;
  }
  return stream.BlockHostUntilDone();
}

// The text of an error lives until the thread's next call; null: there is none.
const char* text_of(const absl::Status& status) {
  static thread_local std::string text;
  if (status.ok()) return nullptr;
  text = status.ToString();
  return text.c_str();
}

}  // namespace

// Null if the fake of this path is complete.
EXPORT const char* hvd_xla_open(const char* path) {
  void* const library = dlopen(path, RTLD_NOW);
  if (!library) return dlerror();
  const char* missing = nullptr;
  const auto bind = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (!*function) missing = name;
  };
#define BIND(name) bind(#name, &cuda.name)
  BIND(cudaSetDevice);
  BIND(cudaStreamCreateWithFlags);
  BIND(cudaStreamDestroy);
  BIND(cudaStreamSynchronize);
  BIND(cudaMalloc);
  BIND(cudaHostAlloc);
  BIND(cudaFreeHost);
  BIND(cudaFree);
  BIND(cudaMemcpyAsync);
  BIND(cudaMemsetAsync);
  BIND(cudaLaunchHostFunc);
  return missing;
}

EXPORT const char* hvd_xla_compile(const char* text, size_t bytes, int device, Program** program) {
  *program = new Program(device);
  return text_of((*program)->compile(std::string(text, bytes)));
}

// For the arguments, results and temporary values of all runs.
EXPORT uint64_t hvd_xla_bytes(Program* program) { return program->allocator.bytes(); }

EXPORT const char* hvd_xla_start(Program* program, const void* const* arguments) {
  return text_of(program->start(arguments));
}

EXPORT const char* hvd_xla_finish(Program* program, void* const* results, const size_t* bytes) {
  return text_of(program->finish(results, bytes));
}

// What the stream is given from now on waits until it is released.
EXPORT void hvd_xla_hold(Program* program) {
  program->held = true;
  cuda.cudaLaunchHostFunc(
      program->stream.get(),
      [](void* held) {
        while (*static_cast<std::atomic<bool>*>(held))
          std::this_thread::sleep_for(std::chrono::microseconds(100));
      },
      &program->held);
}

EXPORT void hvd_xla_release(Program* program) { program->held = false; }

EXPORT void hvd_xla_forget(Program* program) {
  (void)program->stream.BlockHostUntilDone();
  delete program;
}
