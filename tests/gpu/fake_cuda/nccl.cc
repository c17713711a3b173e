// The part of libnccl. Every communicator is blocking, as native/core makes them.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "nccl_work.h"

extern "C" int cudaGetDevice(int* device);

using fake_cuda::Call;
using fake_cuda::Comm;
using fake_cuda::Op;
using fake_cuda::violation;
using fake_cuda::Wire;
using hvd::DType;
using hvd::NcclConfig;
using hvd::NcclId;
using hvd::Reduction;

#define RETURN_IF_FAULTY_IN_GROUP                    \
  if (const int code = fake_cuda::fault(__func__)) { \
    if (depth > 0) group_error = code;               \
    return code;                                     \
  }

namespace {

struct Group {
  std::shared_ptr<Comm> comm;
  CUstream_st* stream;
  std::vector<Op> ops;
  fake_cuda::Clock seen;  // by the thread of the host that launched it
};

constexpr int kFirstOwnOp = 5;
struct OwnOp {
  double factor;
};

std::map<int, OwnOp>& own_ops() {
  static auto* ops = new std::map<int, OwnOp>();
  return *ops;
}

thread_local int depth = 0;
thread_local int group_error = 0;  // of a call in the group that is open
thread_local std::vector<Group> groups;

DType dtype_of(int number) {
  static const DType dtypes[] = {DType::int8,    DType::uint8,   DType::int32,   DType::uint32,
                                 DType::int64,   DType::uint64,  DType::float16, DType::float32,
                                 DType::float64, DType::bfloat16};
  if (number < 0 || number > 9) violation("there is no such dtype");
  return dtypes[number];
}

// A factor, in the memory form of its dtype.
double number_at(DType dtype, const void* data) {
  const double wide = 1;
  const float single = 1;
  const uint16_t half = 0x3c00, brain = 0x3f80;
  const void* one = &wide;
  if (dtype == DType::float32) one = &single;
  if (dtype == DType::float16) one = &half;
  if (dtype == DType::bfloat16) one = &brain;
  return hvd::loops().dot(dtype, data, one, 1);
}

// The collectives in the streams of a device.
struct Launched {
  fake_cuda::Order groups;  // of each communicator
  int stream = 0;           // of the last
  uint64_t place = 0;
};

Launched& launched_on(int device) {
  static auto* launched = new std::map<int, Launched>();
  return (*launched)[device];
}

// The operations of a group run at once, so none may write what another one uses.
void expect_apart(const std::vector<std::deque<fake_cuda::Range>>& of_ops) {
  const auto overlap = [](const fake_cuda::Range& a, const fake_cuda::Range& b) {
    const char* const start = static_cast<const char*>(a.data);
    const char* const other = static_cast<const char*>(b.data);
    return start < other + b.bytes && other < start + a.bytes && (a.writes || b.writes);
  };
  for (size_t i = 0; i < of_ops.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      for (const fake_cuda::Range& a : of_ops[i]) {
        for (const fake_cuda::Range& b : of_ops[k]) {
          if (overlap(a, b)) violation("two operations of a group use the same memory");
        }
      }
    }
  }
}

void enqueue(Group group) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  const std::shared_ptr<Comm> comm = group.comm;
  std::deque<fake_cuda::Range> ranges;
  std::vector<std::deque<fake_cuda::Range>> of_ops;
  for (Op& op : group.ops) {
    const bool reads =
        op.call != Call::receive && (op.call != Call::broadcast || op.other == comm->rank);
    const bool writes =
        op.call != Call::send && (op.call != Call::reduce || op.other == comm->rank);
    const size_t one = op.bytes, all = one * comm->size;
    if (reads) ranges.push_back({op.in, op.call == Call::reduce_scatter ? all : one, false});
    if (writes) ranges.push_back({op.out, op.call == Call::all_gather ? all : one, true});
    of_ops.emplace_back(ranges.end() - (reads + writes), ranges.end());
    if (reads) op.in = fake_cuda::in_work(op.in);
    if (writes) op.out = fake_cuda::in_work(op.out);
  }
  expect_apart(of_ops);
  for (const fake_cuda::Range& range : ranges) {
    if (!fake_cuda::is_device_memory(range.data, range.bytes))
      violation("NCCL is given memory that is not the device's");
  }
  if (group.stream->device != comm->device) violation("NCCL is given a stream of another device");
  Launched& launched = launched_on(comm->device);
  const fake_cuda::Order before = launched.groups;
  ++launched.groups[comm->name];
  group.stream->give(
      "NCCL", ranges,
      [comm, ops = std::move(group.ops), before] {
        try {
          run(*comm, ops, before);
        } catch (const fake_cuda::Aborted&) {  // the stream goes on
        }
        --comm->running;
      },
      group.seen);
  // Two at once deadlock if a device has room for one, and the next device for the other.
  if (group.stream->clock[launched.stream] < launched.place)
    violation("collectives of two communicators may run on a device at once");
  launched.stream = group.stream->number;
  launched.place = group.stream->given;
}

std::atomic<int> launches{0};
std::atomic<int> unsettled{-1};  // a device
std::atomic<int> unsettled_as{hvd::kNcclInProgress};

// What NCCL has begun there goes no further, or fails: then its result.
int unsettled_result(const Comm& comm) {
  while (comm.device == unsettled && unsettled_as == hvd::kNcclInProgress)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return comm.device == unsettled ? unsettled_as.load() : hvd::kNcclSuccess;
}

// NCCL takes its time, as when it connects ranks.
int launch(Group group) {
  ++launches;
  fake_cuda::Random random(1000 + launches % 3000);
  std::this_thread::sleep_for(std::chrono::microseconds(200 + random.below(1000)));
  if (const int result = unsettled_result(*group.comm)) return result;
  ++group.comm->running;
  group.seen = fake_cuda::host();
  enqueue(std::move(group));
  return hvd::kNcclSuccess;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Comm> own;
};

namespace {

std::vector<std::weak_ptr<Comm>>& communicators() {
  static auto* all = new std::vector<std::weak_ptr<Comm>>();
  return *all;
}

int add(ncclComm* comm, CUstream_st* stream, Op op) {
  if (const int state = comm->own->state) return state;
  if (depth == 0) return launch({comm->own, stream, {op}, {}});
  for (Group& group : groups) {
    if (group.comm == comm->own && group.stream == stream) {
      group.ops.push_back(op);
      return hvd::kNcclSuccess;
    }
  }
  groups.push_back({comm->own, stream, {op}, {}});
  return hvd::kNcclSuccess;
}

Op reduction(Call call, const void* in, void* out, size_t count, int dtype, int op, int root) {
  Op made{call,
          static_cast<const char*>(in),
          static_cast<char*>(out),
          0,
          dtype_of(dtype),
          Reduction::sum,
          1.0,
          root};
  made.bytes = static_cast<int64_t>(count * hvd::size_of(made.dtype));
  if (op == 1) made.reduction = Reduction::product;
  if (op == 2) made.reduction = Reduction::max;
  if (op == 3) made.reduction = Reduction::min;
  if (op == 4) made.reduction = Reduction::average;
  if (op >= kFirstOwnOp) {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    made.factor = own_ops().at(op).factor;
  }
  return made;
}

Op movement(Call call, const void* in, void* out, size_t count, int dtype, int other) {
  return reduction(call, in, out, count, dtype, 0, other);
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  RETURN_IF_FAULTY;
  *version = 22703;
  return 0;
}

EXPORT const char* ncclGetErrorString(int result) {
  return result == 6 ? "remote error" : "an error of the fake";
}
EXPORT const char* ncclGetLastError(ncclComm*) { return "as the test wants"; }

EXPORT int ncclGetUniqueId(NcclId* id) {
  RETURN_IF_FAULTY;
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/hvd-fake-%d-%08x%08x", static_cast<int>(getpid()),
                random(), random());
  return 0;
}

EXPORT int ncclCommInitRankConfig(ncclComm** out, int size, NcclId id, int rank,
                                  NcclConfig* config) {
  RETURN_IF_FAULTY;
  if (config->magic != 0xcafebeef || config->blocking != 1 || config->size != sizeof *config)
    violation("a wrong configuration of a communicator");
  const auto comm = std::make_shared<Comm>();
  comm->name = id.bytes;
  comm->wire = std::make_shared<Wire>(id.bytes, rank, size);
  comm->rank = rank;
  comm->size = size;
  cudaGetDevice(&comm->device);
  {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    for (const auto& other : communicators()) {
      const auto alive = other.lock();
      if (alive && alive->device == comm->device && alive->state == hvd::kNcclInProgress)
        violation("two communicators of a device are created at once");
    }
    communicators().push_back(comm);
    launched_on(comm->device).groups[comm->name];  // so that the others' can be compared
  }
  if (const int result = unsettled_result(*comm)) return result;
  comm->wire->barrier();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  comm->wire->remove_name();
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (comm->state == hvd::kNcclInProgress) comm->state = hvd::kNcclSuccess;
  ++fake_cuda::living()["communicator"];
  *out = new ncclComm{comm};
  return hvd::kNcclSuccess;
}

EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  RETURN_IF_FAULTY;
  *state = comm->own->state;
  return 0;
}

EXPORT int ncclCommFinalize(ncclComm* comm) {
  RETURN_IF_FAULTY;
  while (comm->own->running > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  comm->own->finalized = true;
  return 0;
}

EXPORT int ncclCommDestroy(ncclComm* comm) {
  RETURN_IF_FAULTY;
  if (depth > 0 || !groups.empty()) violation("a group was left open");
  if (!comm->own->finalized || comm->own->running > 0)
    violation("a communicator is destroyed that is in use");
  delete comm;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  --fake_cuda::living()["communicator"];
  return 0;
}

EXPORT int ncclCommAbort(ncclComm* comm) {
  RETURN_IF_FAULTY;
  comm->own->wire->aborted = true;
  while (comm->own->running > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  delete comm;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  --fake_cuda::living()["communicator"];
  return 0;
}

EXPORT int ncclGroupStart() {
  RETURN_IF_FAULTY;
  ++depth;
  return 0;
}

EXPORT int ncclGroupEnd() {
  RETURN_IF_FAULTY;
  if (depth == 0) violation("a group ends that was not begun");
  if (--depth > 0) return 0;
  if (const int error = std::exchange(group_error, 0)) {
    groups.clear();
    return error;
  }
  for (Group& group : std::exchange(groups, {})) {
    if (const int result = launch(std::move(group))) return result;
  }
  return hvd::kNcclSuccess;
}

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm*) {
  RETURN_IF_FAULTY;
  if (residence != hvd::kNcclHostScalar) violation("a scalar is not where it is said to be");
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  static int next = kFirstOwnOp;
  *op = next++;
  own_ops()[*op] = {number_at(dtype_of(dtype), scalar)};
  ++fake_cuda::living()["reduction"];
  return 0;
}

EXPORT int ncclRedOpDestroy(int op, ncclComm*) {
  RETURN_IF_FAULTY;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (own_ops().erase(op) != 1) violation("there is no such reduction");
  --fake_cuda::living()["reduction"];
  return 0;
}

EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, ncclComm* comm,
                         CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, reduction(Call::all_reduce, in, out, count, dtype, op, 0));
}

EXPORT int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root,
                      ncclComm* comm, CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, reduction(Call::reduce, in, out, count, dtype, op, root));
}

EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op,
                             ncclComm* comm, CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, reduction(Call::reduce_scatter, in, out, count, dtype, op, 0));
}

EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root,
                         ncclComm* comm, CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, movement(Call::broadcast, in, out, count, dtype, root));
}

EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, ncclComm* comm,
                         CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, movement(Call::all_gather, in, out, count, dtype, 0));
}

EXPORT int ncclSend(const void* in, size_t count, int dtype, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, movement(Call::send, in, nullptr, count, dtype, peer));
}

EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  RETURN_IF_FAULTY_IN_GROUP;
  return add(comm, stream, movement(Call::receive, nullptr, out, count, dtype, peer));
}

// For tests: how many groups of collectives this process has begun.
EXPORT int hvd_fake_cuda_groups() { return launches; }

// For tests: from now on the communicators of a device (< 0: of all) are in this state.
EXPORT void hvd_fake_cuda_fail(int device, int state) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  for (const auto& comm : communicators()) {
    const auto alive = comm.lock();
    if (alive && (device < 0 || alive->device == device)) alive->state = state;
  }
}

// For tests: these GPUs take no further step in any communicator, until it is aborted.
EXPORT void hvd_fake_cuda_stop(int device) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  for (const auto& comm : communicators()) {
    const auto alive = comm.lock();
    if (alive && (device < 0 || alive->device == device)) alive->wire->stopped = true;
  }
}

// For tests: what NCCL begins on this device from now on stays in this state (kNcclInProgress, or
// an error), until it is aborted.
EXPORT void hvd_fake_cuda_unsettle(int device, int state) {
  unsettled_as = state;
  unsettled = device;
}
