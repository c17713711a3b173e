#include "core/gpu/gpu_library.h"

#include <dlfcn.h>

namespace hvd {
namespace {

std::vector<std::string>& folders() {
  static auto* folders = new std::vector<std::string>();
  return *folders;
}

constexpr int kHow = RTLD_NOW | RTLD_LOCAL;

// AMD's HIP has CUDA's functions under names of the same form, but for these two.
std::string hip_name(const std::string& cuda) {
  if (cuda == "cudaHostAlloc") return "hipHostMalloc";
  if (cuda == "cudaFreeHost") return "hipHostFree";
  return cuda.rfind("cuda", 0) == 0 ? "hip" + cuda.substr(4) : cuda;
}

}  // namespace

void set_gpu_folders(const std::vector<std::string>& chosen) { folders() = chosen; }

GpuLibrary::GpuLibrary(const std::vector<std::string>& names, const std::string& chosen,
                       const std::string& variable) {
  if (!chosen.empty()) {
    handle_ = dlopen(chosen.c_str(), kHow);
    if (!handle_) {
      problem_ = variable + " is '" + chosen + "', which does not open: " + dlerror();
    }
    return;
  }
  for (const std::string& name : names) {
    if (!handle_) handle_ = dlopen(name.c_str(), kHow | RTLD_NOLOAD);
  }
  for (const std::string& name : names) {
    for (const std::string& folder : folders()) {
      if (!handle_) handle_ = dlopen((folder + "/" + name).c_str(), kHow);
    }
  }
  for (const std::string& name : names) {
    if (handle_) return;
    handle_ = dlopen(name.c_str(), kHow);
    if (!handle_) problem_ += (problem_.empty() ? "" : "; ") + std::string(dlerror());
  }
  if (handle_) problem_.clear();
}

GpuLibrary::Symbol GpuLibrary::operator[](const char* name) {
  if (!handle_) return {nullptr};
  void* symbol = dlsym(handle_, name);
  if (!symbol) symbol = dlsym(handle_, hip_name(name).c_str());
  if (symbol) {
    symbol_ = symbol;
  } else if (problem_.empty()) {
    problem_ = "it has no function " + std::string(name) + ", so it is too old";
  }
  return {symbol};
}

int GpuLibrary::version(int (*ask)(int*), int oldest, std::string (*text)(int)) {
  int version = 0;
  if (!problem_.empty()) return version;
  if (ask(&version) != 0) {
    problem_ = "its version is unknown";
  } else if (version < oldest) {
    problem_ = "it is version " + text(version) + ", expected " + text(oldest) + " or later";
  }
  return version;
}

std::string GpuLibrary::problem(const std::string& what, const std::string& cure) const {
  if (problem_.empty()) return "";
  const std::string where = file().empty() ? "" : " in " + file();
  return what + where + " cannot be used: " + problem_ + ". " + cure;
}

std::string GpuLibrary::file() const {
  Dl_info info;
  return symbol_ && dladdr(symbol_, &info) ? info.dli_fname : "";
}

}  // namespace hvd
