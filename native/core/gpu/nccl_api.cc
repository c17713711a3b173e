#include "core/gpu/nccl_api.h"

#include "core/base/settings.h"

namespace hvd {
namespace {

// The first with all members of NcclConfig; non-blocking communicators came with 2.14.
constexpr int kOldestNccl = 21700;

}  // namespace

NcclApi::NcclApi(const Settings& settings)
    : library({"libnccl.so.2", "librccl.so.1"}, settings.nccl_library, "HVD_NCCL_LIBRARY") {
  file = library.file();
  version = library.version(get_version, kOldestNccl, nccl_version_text);
  problem = library.problem("NCCL",
                            "Install it, 'pip install nvidia-nccl-cu12' (with CUDA 13: "
                            "nvidia-nccl-cu13), or set HVD_NCCL_LIBRARY to your libnccl.so.2.");
}

const NcclApi* nccl_api(const Settings& settings, std::string* why) {
  static const auto* api = new NcclApi(settings);  // threads use it to the end
  *why = api->problem;
  return why->empty() ? api : nullptr;
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

int nccl_dtype(DType dtype) {
#define HVD_NUMBER(dtype, name, bytes, type, tensorflow, xla, number) number,
  static constexpr int kNumbers[] = {HVD_DTYPES(HVD_NUMBER)};
  return kNumbers[static_cast<int>(dtype)];
}

}  // namespace hvd
