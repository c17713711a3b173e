// A kernel of a GPU, in NVIDIA's assembly language, which the driver compiles: no CUDA toolkit is
// needed. On the fake of tests/gpu, what does the same.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "tests/support/device.h"

namespace hvd::test {

// Counts `turns` down in each thread, then to[i] = from[i] + term for all i < n.
constexpr const char* kLateKernel = R"(
.version 6.0
.target sm_60
.address_size 64
.visible .entry late(.param .u64 to, .param .u64 from, .param .u32 n, .param .f32 term,
                     .param .u32 turns)
{
  .reg .pred %end;
  .reg .u32 %i, %n, %turns, %block, %size, %grid, %step;
  .reg .f32 %x, %term, %y;
  .reg .u64 %to, %from, %at, %address;
  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u32 %n, [n];
  ld.param.f32 %term, [term];
  ld.param.u32 %turns, [turns];
  cvta.to.global.u64 %to, %to;
  cvta.to.global.u64 %from, %from;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %grid, %nctaid.x;
  mov.u32 %i, %tid.x;
  mad.lo.u32 %i, %block, %size, %i;
  mul.lo.u32 %step, %grid, %size;
  mov.f32 %y, 0f3F800000;
SPIN:
  setp.eq.u32 %end, %turns, 0;
  @%end bra WRITE;
  fma.rn.f32 %y, %y, 0f3F7FFFFE, 0f33800000;
  sub.u32 %turns, %turns, 1;
  bra SPIN;
WRITE:
  setp.ge.u32 %end, %i, %n;
  @%end bra DONE;
  mul.wide.u32 %at, %i, 4;
  add.u64 %address, %from, %at;
  ld.global.f32 %x, [%address];
  add.f32 %x, %x, %term;
  setp.lt.f32 %end, %y, 0f00000000;  // never, which no compiler knows
  @%end mov.f32 %x, %y;
  add.u64 %address, %to, %at;
  st.global.f32 [%address], %x;
  add.u32 %i, %i, %step;
  bra WRITE;
DONE:
  ret;
}
)";

class Kernel {
 public:
  // Of the device that the thread has selected, on which it has called CUDA's runtime before.
  explicit Kernel(const Device& device) : stream_(device.stream()) {
    device.bind("cuLaunchKernel", &launch_);
    void* library = nullptr;
    if (launch_) {
      library = dlopen(device.cuda().file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    } else {
      library = dlopen("libcuda.so.1", RTLD_NOW);
      launch_ = reinterpret_cast<Launch*>(library ? dlsym(library, "cuLaunchKernel") : nullptr);
    }
    using Load = int(void**, const void*);
    using Find = int(void**, void*, const char*);
    const auto load =
        reinterpret_cast<Load*>(library ? dlsym(library, "cuModuleLoadData") : nullptr);
    const auto find =
        reinterpret_cast<Find*>(library ? dlsym(library, "cuModuleGetFunction") : nullptr);
    if (!launch_ || !load || !find) {
      why_ = "the driver (libcuda.so.1) cannot be loaded";
      return;
    }
    void* module = nullptr;  // stays: there are few of them
    int status = load(&module, kLateKernel);
    if (status == 0) status = find(&kernel_, module, "late");
    if (status != 0) why_ = "the driver refuses the kernel: CUDA error " + std::to_string(status);
  }

  const std::string& why() const { return why_; }  // it cannot be used; or ""

  // In the device's stream. Few blocks leave room for other kernels.
  void launch(void* to, const void* from, uint32_t n, float term, uint32_t turns) {
    void* arguments[] = {&to, &from, &n, &term, &turns};
    const int status = launch_(kernel_, 4, 1, 1, 128, 1, 1, 0, stream_, arguments, nullptr);
    CHECK_EQ(status, 0);
  }

 private:
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     CudaStream, void**, void**);

  const CudaStream stream_;
  Launch* launch_ = nullptr;
  void* kernel_ = nullptr;
  std::string why_;
};

}  // namespace hvd::test
