// What we use of NCCL, or of AMD's RCCL, by its documented C interface
// (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html). Opened at run time. And a
// communicator of the ranks of a process set.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>

#include "core/base/clock.h"
#include "core/gpu/cuda_api.h"
#include "core/request/request.h"

struct ncclComm;

namespace hvd {

using NcclComm = ncclComm*;

constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;

constexpr int kNcclBytes = 1;  // ncclUint8

// As NCCL numbers them.
constexpr int kNcclSum = 0, kNcclProduct = 1, kNcclMax = 2, kNcclMin = 3, kNcclAverage = 4;

constexpr int kNcclHostScalar = 1;  // ncclScalarHostImmediate: read before the call returns

struct NcclId {
  char bytes[128];
};

// The first members of ncclConfig_t, as of 2.17: NCCL takes as many as `size` says, and later
// versions only append.
struct NcclConfig {
  static constexpr int kUnset = std::numeric_limits<int>::min();

  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 1;
  int cga_cluster_size = kUnset;
  int least_ctas = kUnset;
  int most_ctas = kUnset;
  const char* net_name = nullptr;
};

struct NcclApi {
  explicit NcclApi(const Settings& settings);

  GpuLibrary library;  // gives the functions
  std::string file;
  std::string problem;  // why it cannot be used, and what to do; empty: it can
  int version = 0;      // 10000 × major + 100 × minor + patch

  int (*get_version)(int*) = library["ncclGetVersion"];
  const char* (*error_string)(int) = library["ncclGetErrorString"];
  const char* (*last_error)(NcclComm) = library["ncclGetLastError"];
  int (*get_unique_id)(NcclId*) = library["ncclGetUniqueId"];
  int (*init_rank)(NcclComm*, int size, NcclId, int rank,
                   NcclConfig*) = library["ncclCommInitRankConfig"];
  int (*finalize)(NcclComm) = library["ncclCommFinalize"];
  int (*destroy)(NcclComm) = library["ncclCommDestroy"];
  int (*abort)(NcclComm) = library["ncclCommAbort"];
  int (*async_error)(NcclComm, int*) = library["ncclCommGetAsyncError"];
  int (*group_start)() = library["ncclGroupStart"];
  int (*group_end)() = library["ncclGroupEnd"];
  int (*create_op)(int* op, void* scalar, int dtype, int residence,
                   NcclComm) = library["ncclRedOpCreatePreMulSum"];
  int (*destroy_op)(int op, NcclComm) = library["ncclRedOpDestroy"];
  int (*all_reduce)(const void*, void*, size_t, int dtype, int op, NcclComm,
                    CudaStream) = library["ncclAllReduce"];
  int (*reduce)(const void*, void*, size_t, int dtype, int op, int root, NcclComm,
                CudaStream) = library["ncclReduce"];
  int (*reduce_scatter)(const void*, void*, size_t, int dtype, int op, NcclComm,
                        CudaStream) = library["ncclReduceScatter"];
  int (*broadcast)(const void*, void*, size_t, int dtype, int root, NcclComm,
                   CudaStream) = library["ncclBroadcast"];
  int (*all_gather)(const void*, void*, size_t, int dtype, NcclComm,
                    CudaStream) = library["ncclAllGather"];
  int (*send)(const void*, size_t, int dtype, int peer, NcclComm, CudaStream) = library["ncclSend"];
  int (*receive)(void*, size_t, int dtype, int peer, NcclComm, CudaStream) = library["ncclRecv"];
};

// Null if there is none, with the reason and what to do. The first call of the process opens it.
const NcclApi* nccl_api(const Settings& settings, std::string* why);

std::string nccl_version_text(int version);

// NCCL's number of a dtype in which it can compute; -1: it cannot. A bool is a byte of 0 or 1.
int nccl_dtype(DType dtype);

// Called between two polls; throws to end the wait.
using Pause = std::function<void()>;

// Looks after calls that may wait for other ranks and cannot be interrupted.
class CallWatch {
 public:
  CallWatch();
  ~CallWatch();

  // While this object lives, a call is under way. If it takes long, another thread calls `pause`
  // from time to time, until that throws; the caller's own thread then does nothing else.
  class Call {
   public:
    Call(CallWatch& watch, const Pause& pause);
    ~Call();

   private:
    CallWatch& watch_;
  };

 private:
  void watch();

  std::mutex mutex_;  // guards the members below
  std::condition_variable ended_;
  bool over_ = false;
  const Pause* pause_ = nullptr;  // of the call under way
  Clock::time_point since_;
  std::thread thread_;  // last: it uses all of the above
};

// A blocking communicator: for a non-blocking one of several ranks NCCL starts a thread for each
// group, which took 100 us where the group itself took 16 (an H100, NCCL 2.32).
class NcclCommunicator {
 public:
  // Collective. Throws GpuError, or what `pause` throws; NCCL may then wait for ever, in a thread
  // of its own.
  NcclCommunicator(const NcclApi& nccl, const CudaApi& cuda, int device, const NcclId& id, int rank,
                   int size, const Pause& pause);
  ~NcclCommunicator();  // aborts unfinished work, unless close() was called

  const NcclApi& api() const { return nccl_; }
  NcclComm handle() const { return comm_; }

  // Runs NCCL calls as one group. On return all of it is enqueued in the stream. NCCL may wait for
  // the other ranks meanwhile, to connect to them; `pause` is then called by another thread. If it
  // throws, the thread must call NCCL no more: its group may be open.
  void group(const std::function<void()>& calls, const Pause& pause);

  // How many groups have been begun. If one fails, a part of it may be enqueued.
  uint64_t groups() const { return groups_; }

  // Throws GpuError with NCCL's own text.
  void check(int result, const char* call) const;

  // An asynchronous error of this rank or of the network, or "".
  std::string problem() const;

  // Collective, after all work is finished.
  void close();

 private:
  const NcclApi& nccl_;
  NcclComm comm_ = nullptr;
  uint64_t groups_ = 0;
  CallWatch watch_;
};

}  // namespace hvd
