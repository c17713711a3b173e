// Compares what native/core declares of CUDA and NCCL by itself with NVIDIA's headers: it compiles
// if the two agree. tests/gpu/test_abi.py compiles it.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <type_traits>

#include "core/gpu/cuda_api.h"
#include "core/gpu/nccl_api.h"

namespace hvd {
namespace {

// Whether a value of one type is passed as one of the other is.
template <typename Ours, typename Theirs>
constexpr bool same() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_enum_v<Theirs>) {  // C's enums are of the size of an int
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using A = std::remove_pointer_t<Ours>;
    using B = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_class_v<A> || std::is_class_v<B>) {
      // The structs that only the library knows have the same name; the others are compared below.
      return std::is_same_v<A, B> ||
             (std::is_same_v<A, NcclId> && std::is_same_v<B, ncclUniqueId>) ||
             (std::is_same_v<A, NcclConfig> && std::is_same_v<B, ncclConfig_t>);
    } else {
      return same<A, B>();
    }
  } else {
    return std::is_same_v<Ours, NcclId> && std::is_same_v<Theirs, ncclUniqueId>;
  }
}

template <typename Ours, typename Theirs>
struct Same;

template <typename A, typename... As, typename B, typename... Bs>
struct Same<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool results = same<A, B>();
  static constexpr bool arguments = [] {
    if constexpr (sizeof...(As) == sizeof...(Bs)) return (same<As, Bs>() && ...);
    return false;
  }();
};

// Of functions that cannot throw, as CUDA's and NCCL's say in some versions.
template <typename Function>
struct Plain {
  using type = Function;
};
template <typename A, typename... As>
struct Plain<A (*)(As...) noexcept> {
  using type = A (*)(As...);
};

#define COMPARE(Api, ours, theirs)                                                    \
  static_assert(Same<decltype(Api::ours), Plain<decltype(&theirs)>::type>::results,   \
                #theirs " returns something else");                                   \
  static_assert(Same<decltype(Api::ours), Plain<decltype(&theirs)>::type>::arguments, \
                #theirs " has other arguments")

COMPARE(CudaApi, runtime_version, cudaRuntimeGetVersion);
COMPARE(CudaApi, error_string, cudaGetErrorString);
COMPARE(CudaApi, get_device, cudaGetDevice);
COMPARE(CudaApi, set_device, cudaSetDevice);
COMPARE(CudaApi, bus_id, cudaDeviceGetPCIBusId);
COMPARE(CudaApi, priorities, cudaDeviceGetStreamPriorityRange);
COMPARE(CudaApi, create_stream, cudaStreamCreateWithPriority);
COMPARE(CudaApi, destroy_stream, cudaStreamDestroy);
COMPARE(CudaApi, stream_wait, cudaStreamWaitEvent);
COMPARE(CudaApi, create_event, cudaEventCreateWithFlags);
COMPARE(CudaApi, destroy_event, cudaEventDestroy);
COMPARE(CudaApi, record_event, cudaEventRecord);
COMPARE(CudaApi, query_event, cudaEventQuery);
COMPARE(CudaApi, copy, cudaMemcpyAsync);
COMPARE(CudaApi, allocate, cudaMalloc);
COMPARE(CudaApi, free, cudaFree);
COMPARE(CudaApi, allocate_host, cudaHostAlloc);
COMPARE(CudaApi, free_host, cudaFreeHost);

COMPARE(NcclApi, get_version, ncclGetVersion);
COMPARE(NcclApi, error_string, ncclGetErrorString);
COMPARE(NcclApi, last_error, ncclGetLastError);
COMPARE(NcclApi, get_unique_id, ncclGetUniqueId);
COMPARE(NcclApi, init_rank, ncclCommInitRankConfig);
COMPARE(NcclApi, finalize, ncclCommFinalize);
COMPARE(NcclApi, destroy, ncclCommDestroy);
COMPARE(NcclApi, abort, ncclCommAbort);
COMPARE(NcclApi, async_error, ncclCommGetAsyncError);
COMPARE(NcclApi, group_start, ncclGroupStart);
COMPARE(NcclApi, group_end, ncclGroupEnd);
COMPARE(NcclApi, create_op, ncclRedOpCreatePreMulSum);
COMPARE(NcclApi, destroy_op, ncclRedOpDestroy);
COMPARE(NcclApi, all_reduce, ncclAllReduce);
COMPARE(NcclApi, reduce, ncclReduce);
COMPARE(NcclApi, reduce_scatter, ncclReduceScatter);
COMPARE(NcclApi, broadcast, ncclBroadcast);
COMPARE(NcclApi, all_gather, ncclAllGather);
COMPARE(NcclApi, send, ncclSend);
COMPARE(NcclApi, receive, ncclRecv);

static_assert(kCudaSuccess == cudaSuccess && kCudaNotReady == cudaErrorNotReady);
static_assert(kCudaStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(kCudaMemcpyDefault == cudaMemcpyDefault);

static_assert(kNcclSuccess == ncclSuccess && kNcclInProgress == ncclInProgress);
static_assert(kNcclSum == ncclSum && kNcclProduct == ncclProd && kNcclMax == ncclMax &&
              kNcclMin == ncclMin && kNcclAverage == ncclAvg);
static_assert(kNcclHostScalar == ncclScalarHostImmediate && kNcclBytes == ncclUint8);

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId) && alignof(NcclId) == alignof(ncclUniqueId));

#define MEMBER(ours, theirs)                                                            \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs) &&         \
                    same<decltype(NcclConfig::ours), decltype(ncclConfig_t::theirs)>(), \
                #theirs " is elsewhere or another")
MEMBER(size, size);
MEMBER(magic, magic);
MEMBER(version, version);
MEMBER(blocking, blocking);
MEMBER(cga_cluster_size, cgaClusterSize);
MEMBER(least_ctas, minCTAs);
MEMBER(most_ctas, maxCTAs);
MEMBER(net_name, netName);
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(NcclConfig::kUnset == NCCL_CONFIG_UNDEF_INT);

// Not constants: checked when it runs.
bool wrong() {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  const bool config = ours.magic == theirs.magic && ours.net_name == theirs.netName &&
                      ours.version <= theirs.version;
  const bool dtypes =
      nccl_dtype(DType::int8) == ncclInt8 && nccl_dtype(DType::uint8) == ncclUint8 &&
      nccl_dtype(DType::int32) == ncclInt32 && nccl_dtype(DType::uint32) == ncclUint32 &&
      nccl_dtype(DType::int64) == ncclInt64 && nccl_dtype(DType::uint64) == ncclUint64 &&
      nccl_dtype(DType::float16) == ncclFloat16 && nccl_dtype(DType::float32) == ncclFloat32 &&
      nccl_dtype(DType::float64) == ncclFloat64 && nccl_dtype(DType::bfloat16) == ncclBfloat16;
  return !config || !dtypes;
}

}  // namespace
}  // namespace hvd

int main() { return hvd::wrong(); }
