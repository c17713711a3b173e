#include "core/gpu/nccl_api.h"

#include "core/base/settings.h"
#include "core/gpu/gpu_library.h"

namespace hvd {
namespace {

// The first with all members of NcclConfig; non-blocking communicators came with 2.14.
constexpr int kOldestNccl = 21700;

Opened<NcclApi> open(const Settings& settings) {
  GpuLibrary library({"libnccl.so.2"}, settings.nccl_library, "HVD_NCCL_LIBRARY");
  Opened<NcclApi> opened;
  NcclApi& api = opened.api;
  library.bind("ncclGetVersion", &api.get_version);
  library.bind("ncclGetErrorString", &api.error_string);
  library.bind("ncclGetLastError", &api.last_error);
  library.bind("ncclGetUniqueId", &api.get_unique_id);
  library.bind("ncclCommInitRankConfig", &api.init_rank);
  library.bind("ncclCommFinalize", &api.finalize);
  library.bind("ncclCommDestroy", &api.destroy);
  library.bind("ncclCommAbort", &api.abort);
  library.bind("ncclCommGetAsyncError", &api.async_error);
  library.bind("ncclGroupStart", &api.group_start);
  library.bind("ncclGroupEnd", &api.group_end);
  library.bind("ncclRedOpCreatePreMulSum", &api.create_op);
  library.bind("ncclRedOpDestroy", &api.destroy_op);
  library.bind("ncclAllReduce", &api.all_reduce);
  library.bind("ncclReduce", &api.reduce);
  library.bind("ncclReduceScatter", &api.reduce_scatter);
  library.bind("ncclBroadcast", &api.broadcast);
  library.bind("ncclAllGather", &api.all_gather);
  library.bind("ncclSend", &api.send);
  library.bind("ncclRecv", &api.receive);
  api.file = library.file();
  api.version = library.version(api.get_version, kOldestNccl, nccl_version_text);
  opened.problem = library.problem("NCCL",
                                   "Install it, 'pip install nvidia-nccl-cu12' (with CUDA 13: "
                                   "nvidia-nccl-cu13), or set HVD_NCCL_LIBRARY to your "
                                   "libnccl.so.2.");
  return opened;
}

}  // namespace

const NcclApi* nccl_api(const Settings& settings, std::string* why) {
  static const auto* opened = new Opened<NcclApi>(open(settings));  // threads use it to the end
  return opened->get(why);
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

int nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::uint8:
      return kNcclBytes;
    case DType::int8:
      return 0;
    case DType::int32:
      return 2;
    case DType::uint32:
      return 3;
    case DType::int64:
      return 4;
    case DType::uint64:
      return 5;
    case DType::float16:
      return 6;
    case DType::float32:
      return 7;
    case DType::float64:
      return 8;
    case DType::bfloat16:
      return 9;
    case DType::uint16:
    case DType::int16:
      break;
  }
  return -1;
}

}  // namespace hvd
