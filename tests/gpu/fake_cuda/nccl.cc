// The part of libnccl. Every communicator is non-blocking, as native/core makes them.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/gpu/nccl_api.h"
#include "core/math/loops.h"
#include "fake_cuda.h"
#include "wire.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int cudaGetDevice(int* device);

using fake_cuda::violation;
using fake_cuda::Wire;
using hvd::DType;
using hvd::NcclConfig;
using hvd::NcclId;
using hvd::Reduction;

namespace {

enum class Call { all_reduce, reduce, reduce_scatter, broadcast, all_gather, send, receive };

struct Op {
  Call call;
  const char* in;
  char* out;
  int64_t bytes;  // of the smaller of `in` and `out`
  DType dtype;
  Reduction reduction;
  double factor;
  int other;  // the root or peer
};

struct Comm {
  std::shared_ptr<Wire> wire;
  int rank, size, device;
  std::atomic<int> state{hvd::kNcclInProgress};
  std::atomic<int> enqueuing{0};  // groups on their way to a stream
  std::atomic<int> running{0};    // groups in a stream
  std::atomic<bool> finalized{false};
};

struct Group {
  std::shared_ptr<Comm> comm;
  CUstream_st* stream;
  std::vector<Op> ops;
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

// What all ranks of a communicator must enqueue alike.
std::string describe(const Op& op) {
  if (op.call == Call::send || op.call == Call::receive) return "";
  static const char* names[] = {"AllReduce", "Reduce", "ReduceScatter", "Broadcast", "AllGather"};
  char text[200];
  std::snprintf(text, sizeof text, "%s of %lld bytes of %s, reduction %d × %.17g, root %d; ",
                names[static_cast<int>(op.call)], static_cast<long long>(op.bytes),
                hvd::name_of(op.dtype), static_cast<int>(op.reduction), op.factor, op.other);
  return text;
}

void compare(const Comm& comm, const std::vector<Op>& ops) {
  std::string mine;
  for (const Op& op : ops) mine += describe(op);
  const size_t hash = std::hash<std::string>()(mine);
  char* text = comm.wire->text(comm.rank);
  std::snprintf(text, Wire::kTextBytes, "%zx %s", hash, mine.c_str());
  comm.wire->barrier();
  for (int r = 0; r < comm.size; ++r) {
    if (std::strcmp(comm.wire->text(r), text) != 0) {
      violation("ranks enqueue different collectives. Rank " + std::to_string(comm.rank) + ": " +
                text + " Rank " + std::to_string(r) + ": " + comm.wire->text(r));
    }
  }
  comm.wire->barrier();
}

// `root` < 0: to all.
void reduce(const Comm& comm, const Op& op, const char* in, char* out, int root) {
  const int64_t width = static_cast<int64_t>(hvd::size_of(op.dtype));
  std::vector<const void*> sources;
  for (int r = 0; r < comm.size; ++r) sources.push_back(comm.wire->slot(r));
  for (int64_t start = 0; start < op.bytes; start += Wire::kSlotBytes) {
    const int64_t bytes = std::min(Wire::kSlotBytes, op.bytes - start);
    std::memcpy(comm.wire->slot(comm.rank), in + start, bytes);
    comm.wire->barrier();
    if (root < 0 || root == comm.rank) {
      const double divisor = op.reduction == hvd::Reduction::average ? comm.size : 1.0;
      hvd::loops().reduce(op.dtype, op.reduction, {op.factor, divisor, 1}, sources.data(),
                          comm.size, bytes / width, out + start);
    }
    comm.wire->barrier();
  }
}

void broadcast(const Comm& comm, const Op& op, const char* in, char* out, int root) {
  for (int64_t start = 0; start < op.bytes; start += Wire::kSlotBytes) {
    const int64_t bytes = std::min(Wire::kSlotBytes, op.bytes - start);
    if (root == comm.rank) std::memcpy(comm.wire->slot(root), in + start, bytes);
    comm.wire->barrier();
    std::memcpy(out + start, comm.wire->slot(root), bytes);
    comm.wire->barrier();
  }
}

// All sends and receives of a group, at once.
void exchange(const Comm& comm, const std::vector<Op>& ops) {
  std::vector<std::string> to(comm.size), from(comm.size);
  for (const Op& op : ops) {
    if (op.call == Call::send) to[op.other].append(op.in, op.bytes);
    if (op.call == Call::receive) from[op.other].append(op.bytes, '\0');
  }
  const size_t size = comm.size;
  int64_t* mine = reinterpret_cast<int64_t*>(comm.wire->slot(comm.rank));
  for (size_t r = 0; r < size; ++r) {
    mine[r] = static_cast<int64_t>(to[r].size());
    mine[size + r] = static_cast<int64_t>(from[r].size());
  }
  comm.wire->barrier();
  const auto count_of = [&](size_t rank, size_t at) {
    return reinterpret_cast<int64_t*>(comm.wire->slot(static_cast<int>(rank)))[at];
  };
  int64_t longest = 0;
  for (size_t a = 0; a < size; ++a) {
    for (size_t b = 0; b < size; ++b) {
      if (count_of(a, b) != count_of(b, size + a)) {
        violation("rank " + std::to_string(a) + " sends " + std::to_string(count_of(a, b)) +
                  " bytes to rank " + std::to_string(b) + ", which expects " +
                  std::to_string(count_of(b, size + a)));
      }
      longest = std::max(longest, count_of(a, b));
    }
  }
  comm.wire->barrier();
  const int64_t part = Wire::kSlotBytes / comm.size;
  const auto piece = [&](const std::string& all, int64_t start) {
    return std::clamp<int64_t>(static_cast<int64_t>(all.size()) - start, 0, part);
  };
  for (int64_t start = 0; start < longest; start += part) {
    for (int r = 0; r < comm.size; ++r) {
      const int64_t n = piece(to[r], start);
      if (n > 0) std::memcpy(comm.wire->slot(comm.rank) + r * part, to[r].data() + start, n);
    }
    comm.wire->barrier();
    for (int r = 0; r < comm.size; ++r) {
      const int64_t n = piece(from[r], start);
      if (n > 0) std::memcpy(from[r].data() + start, comm.wire->slot(r) + comm.rank * part, n);
    }
    comm.wire->barrier();
  }
  std::vector<int64_t> taken(comm.size, 0);
  for (const Op& op : ops) {
    if (op.call != Call::receive) continue;
    std::memcpy(op.out, from[op.other].data() + taken[op.other], op.bytes);
    taken[op.other] += op.bytes;
  }
}

void run(const Comm& comm, const std::vector<Op>& ops) {
  compare(comm, ops);
  for (const Op& op : ops) {
    if (op.call == Call::all_reduce) reduce(comm, op, op.in, op.out, -1);
    if (op.call == Call::reduce) reduce(comm, op, op.in, op.out, op.other);
    if (op.call == Call::broadcast) broadcast(comm, op, op.in, op.out, op.other);
    for (int r = 0; r < comm.size && op.call == Call::reduce_scatter; ++r)
      reduce(comm, op, op.in + r * op.bytes, op.out, r);
    for (int r = 0; r < comm.size && op.call == Call::all_gather; ++r)
      broadcast(comm, op, op.in, op.out + r * op.bytes, r);
  }
  exchange(comm, ops);
}

// As NCCL does for a non-blocking communicator: a thread puts the work into the stream, later.
void enqueue(Group group) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  const std::shared_ptr<Comm> comm = group.comm;
  std::deque<CUstream_st::Range> ranges;
  for (const Op& op : group.ops) {
    const bool reads =
        op.call != Call::receive && (op.call != Call::broadcast || op.other == comm->rank);
    const bool writes =
        op.call != Call::send && (op.call != Call::reduce || op.other == comm->rank);
    const size_t one = op.bytes, all = one * comm->size;
    if (reads) ranges.push_back({op.in, op.call == Call::reduce_scatter ? all : one, false});
    if (writes) ranges.push_back({op.out, op.call == Call::all_gather ? all : one, true});
  }
  for (const CUstream_st::Range& range : ranges) {
    if (!fake_cuda::is_device_memory(range.data, range.bytes))
      violation("NCCL is given memory that is not the device's");
  }
  if (group.stream->device != comm->device) violation("NCCL is given a stream of another device");
  group.stream->give("NCCL", ranges, [comm, ops = std::move(group.ops)] {
    try {
      run(*comm, ops);
    } catch (const fake_cuda::Aborted&) {  // the stream goes on
    }
    --comm->running;
  });
  --comm->enqueuing;
}

std::atomic<int> launched{0};

void launch(Group group) {
  ++launched;
  ++group.comm->running;
  ++group.comm->enqueuing;
  std::thread([group = std::move(group)]() mutable {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    enqueue(std::move(group));
  }).detach();
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
  const int state = comm->own->state;
  if (state == hvd::kNcclInProgress || comm->own->enqueuing > 0)
    violation("NCCL is called before it has settled");
  if (state != hvd::kNcclSuccess) return state;
  if (depth == 0) {
    launch({comm->own, stream, {op}});
    return hvd::kNcclInProgress;
  }
  for (Group& group : groups) {
    if (group.comm == comm->own && group.stream == stream) {
      group.ops.push_back(op);
      return hvd::kNcclSuccess;
    }
  }
  groups.push_back({comm->own, stream, {op}});
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
  *version = 22703;
  return 0;
}

EXPORT const char* ncclGetErrorString(int result) {
  return result == 6 ? "remote error" : "an error of the fake";
}
EXPORT const char* ncclGetLastError(ncclComm*) { return "as the test wants"; }

EXPORT int ncclGetUniqueId(NcclId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/hvd-fake-%d-%08x%08x", static_cast<int>(getpid()),
                random(), random());
  return 0;
}

EXPORT int ncclCommInitRankConfig(ncclComm** out, int size, NcclId id, int rank,
                                  NcclConfig* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size != sizeof *config)
    violation("a wrong configuration of a communicator");
  const auto comm = std::make_shared<Comm>();
  comm->wire = std::make_shared<Wire>(id.bytes, rank, size);
  comm->rank = rank;
  comm->size = size;
  cudaGetDevice(&comm->device);
  *out = new ncclComm{comm};
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  communicators().push_back(comm);
  ++fake_cuda::living()["communicator"];
  std::thread([comm] {
    try {
      comm->wire->barrier();
      comm->wire->remove_name();
      comm->state = hvd::kNcclSuccess;
    } catch (const fake_cuda::Aborted&) {
    }
  }).detach();
  return hvd::kNcclInProgress;
}

EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  *state = comm->own->state;
  const bool busy = comm->own->enqueuing > 0 || (comm->own->finalized && comm->own->running > 0);
  if (*state == hvd::kNcclSuccess && busy) *state = hvd::kNcclInProgress;
  return 0;
}

EXPORT int ncclCommFinalize(ncclComm* comm) {
  comm->own->finalized = true;
  return hvd::kNcclInProgress;
}

EXPORT int ncclCommDestroy(ncclComm* comm) {
  if (depth > 0 || !groups.empty()) violation("a group was left open");
  if (!comm->own->finalized || comm->own->running > 0)
    violation("a communicator is destroyed that is in use");
  delete comm;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  --fake_cuda::living()["communicator"];
  return 0;
}

EXPORT int ncclCommAbort(ncclComm* comm) {
  comm->own->wire->aborted = true;
  while (comm->own->running > 0 || comm->own->enqueuing > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  delete comm;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  --fake_cuda::living()["communicator"];
  return 0;
}

EXPORT int ncclGroupStart() {
  ++depth;
  return 0;
}

EXPORT int ncclGroupEnd() {
  if (depth == 0) violation("a group ends that was not begun");
  if (--depth > 0) return 0;
  for (Group& group : groups) launch(std::move(group));
  groups.clear();
  return hvd::kNcclInProgress;
}

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm*) {
  if (residence != hvd::kNcclHostScalar) violation("a scalar is not where it is said to be");
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  static int next = kFirstOwnOp;
  *op = next++;
  own_ops()[*op] = {number_at(dtype_of(dtype), scalar)};
  ++fake_cuda::living()["reduction"];
  return 0;
}

EXPORT int ncclRedOpDestroy(int op, ncclComm*) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (own_ops().erase(op) != 1) violation("there is no such reduction");
  --fake_cuda::living()["reduction"];
  return 0;
}

EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, ncclComm* comm,
                         CUstream_st* stream) {
  return add(comm, stream, reduction(Call::all_reduce, in, out, count, dtype, op, 0));
}

EXPORT int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root,
                      ncclComm* comm, CUstream_st* stream) {
  return add(comm, stream, reduction(Call::reduce, in, out, count, dtype, op, root));
}

EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op,
                             ncclComm* comm, CUstream_st* stream) {
  return add(comm, stream, reduction(Call::reduce_scatter, in, out, count, dtype, op, 0));
}

EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root,
                         ncclComm* comm, CUstream_st* stream) {
  return add(comm, stream, movement(Call::broadcast, in, out, count, dtype, root));
}

EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, ncclComm* comm,
                         CUstream_st* stream) {
  return add(comm, stream, movement(Call::all_gather, in, out, count, dtype, 0));
}

EXPORT int ncclSend(const void* in, size_t count, int dtype, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  return add(comm, stream, movement(Call::send, in, nullptr, count, dtype, peer));
}

EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  return add(comm, stream, movement(Call::receive, nullptr, out, count, dtype, peer));
}

// For tests: how many groups of collectives this process has begun.
EXPORT int hvd_fake_cuda_groups() { return launched; }

// For tests: from now on all communicators of this process are in this state.
EXPORT void hvd_fake_cuda_fail(int state) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  for (const auto& comm : communicators()) {
    if (const auto alive = comm.lock()) alive->state = state;
  }
}

// For tests: this process's GPU takes no further step in any communicator, until it is aborted.
EXPORT void hvd_fake_cuda_stop() {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  for (const auto& comm : communicators()) {
    if (const auto alive = comm.lock()) alive->wire->stopped = true;
  }
}
