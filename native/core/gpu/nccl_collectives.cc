#include "core/gpu/nccl_collectives.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// Of float16, with all its 11 bits.
constexpr double kLeastHalf = 1.0 / 16384, kMostHalf = 65504;

}  // namespace

// What NCCL calls the reduction of a request, factors included, for one dtype.
class NcclCollectives::Operation {
 public:
  Operation(NcclCommunicator& communicator, const Request& request, DType dtype, int size)
      : communicator_(communicator) {
    const bool average = request.reduction == Reduction::average;
    double factor = request.prescale * request.postscale;
    if (request.reduction == Reduction::min) number_ = kNcclMin;
    if (request.reduction == Reduction::max) number_ = kNcclMax;
    if (request.reduction == Reduction::product) number_ = kNcclProduct;
    if (average) number_ = kNcclAverage;
    if (factor == 1.0) return;
    if (average) factor /= size;
    // One factor, rounded to the dtype, on each input: a floating one, problem() refuses others.
    double scalar = factor;  // as large as any
    if (dtype != DType::float64) loops().convert(DType::float64, &factor, dtype, &scalar, 1);
    communicator_.check(communicator_.api().create_op(&number_, &scalar, nccl_dtype(dtype),
                                                      kNcclHostScalar, communicator_.handle()),
                        "ncclRedOpCreatePreMulSum");
    made_ = true;
  }
  ~Operation() {
    if (made_) communicator_.api().destroy_op(number_, communicator_.handle());
  }
  Operation(const Operation&) = delete;

  int number() const { return number_; }

 private:
  NcclCommunicator& communicator_;
  int number_ = kNcclSum;
  bool made_ = false;
};

bool NcclCollectives::can(const Request& request, int size) {
  const auto known = {Kind::allreduce, Kind::broadcast,     Kind::allgather,
                      Kind::alltoall,  Kind::reducescatter, Kind::reduce};
  if (std::find(known.begin(), known.end(), request.kind) == known.end()) return false;
  if (!collective(request.kind).reduces) return true;
  if (request.reduction == Reduction::adasum) return false;
  if (request.wire != DType::float64) return false;  // NCCL does not round
  const bool sums = request.reduction == Reduction::sum || request.reduction == Reduction::average;
  const bool scales = request.prescale != 1.0 || request.postscale != 1.0;
  if (!sums && scales) return false;
  // It rounds a factor to the dtype, of which float16 would make 0 or infinity.
  double factor = std::abs(request.prescale * request.postscale);
  if (request.reduction == Reduction::average) factor /= size;
  const bool is_half = !scales || (factor >= kLeastHalf && factor <= kMostHalf);
  return std::all_of(request.inputs.begin(), request.inputs.end(), [&](const Input& input) {
    return nccl_dtype(input.dtype) >= 0 && (is_half || input.dtype != DType::float16);
  });
}

Status NcclCollectives::run(Request& request, const Waiting& waiting, const Pause& pause,
                            const std::function<void()>& allocated) {
  const Collective& row = collective(request.kind);
  const int size = host_.size(), root = host_.number_in_set(request.root);
  Layout layout;
  if (!row.keeps_shape) {
    const Status status = lay_out(request, host_, waiting, &layout);
    if (!status.ok()) return status;
    allocated();
  }
  std::map<DType, Operation> operations;
  for (const Input& input : request.inputs) {
    if (row.reduces && input.bytes() > 0)
      operations.try_emplace(input.dtype, communicator_, request, input.dtype, size);
  }
  const auto calls = [&] {
    if (request.kind == Kind::alltoall) return exchange(layout.sent, layout.received);
    for (size_t i = 0; i < request.inputs.size(); ++i) {
      const Input& input = request.inputs[i];
      if (request.kind == Kind::allgather) allgather(request, i, layout.gathered[i]);
      if (request.kind == Kind::allgather || input.bytes() == 0) continue;
      if (request.kind == Kind::broadcast) {
        check(nccl().broadcast(input.data, request.outputs[i], input.bytes(), kNcclBytes, root,
                               communicator_.handle(), stream_),
              "ncclBroadcast");
        continue;
      }
      const int op = operations.at(input.dtype).number();
      if (request.kind == Kind::reducescatter) {
        reducescatter(request, i, op);
        continue;
      }
      if (request.kind == Kind::reduce) {
        check(nccl().reduce(input.data, request.outputs[i], elements(input.shape),
                            nccl_dtype(input.dtype), op, root, communicator_.handle(), stream_),
              "ncclReduce");
        continue;
      }
      check(nccl().all_reduce(input.data, request.outputs[i], elements(input.shape),
                              nccl_dtype(input.dtype), op, communicator_.handle(), stream_),
            "ncclAllReduce");
    }
  };
  communicator_.group(calls, pause);
  return {};
}

// ncclAllGather needs equal sizes; otherwise one broadcast per rank.
void NcclCollectives::allgather(const Request& request, size_t i,
                                const std::vector<int64_t>& of_ranks) {
  const void* in = request.inputs[i].data;
  const int64_t most = *std::max_element(of_ranks.begin(), of_ranks.end());
  if (most == 0) return;
  if (most == *std::min_element(of_ranks.begin(), of_ranks.end())) {
    return check(nccl().all_gather(in, request.outputs[i], most, kNcclBytes, communicator_.handle(),
                                   stream_),
                 "ncclAllGather");
  }
  char* out = static_cast<char*>(request.outputs[i]);
  for (int r = 0; r < host_.size(); ++r) {
    if (of_ranks[r] == 0) continue;
    check(nccl().broadcast(r == host_.rank() ? in : out, out, of_ranks[r], kNcclBytes, r,
                           communicator_.handle(), stream_),
          "ncclBroadcast");
    out += of_ranks[r];
  }
}

void NcclCollectives::exchange(const std::vector<Part>& sent, const std::vector<Part>& received) {
  for (const Part& part : sent) {
    if (part.bytes > 0)
      check(nccl().send(part.data, part.bytes, kNcclBytes, part.rank, communicator_.handle(),
                        stream_),
            "ncclSend");
  }
  for (const Part& part : received) {
    if (part.bytes > 0)
      check(nccl().receive(part.data, part.bytes, kNcclBytes, part.rank, communicator_.handle(),
                           stream_),
            "ncclRecv");
  }
}

// ncclReduceScatter needs equal slices; otherwise one reduction per rank.
void NcclCollectives::reducescatter(const Request& request, size_t i, int op) {
  const Input& input = request.inputs[i];
  const int size = host_.size(), dtype = nccl_dtype(input.dtype);
  if (input.shape[0] % size == 0) {
    return check(nccl().reduce_scatter(input.data, request.outputs[i], elements(input.shape) / size,
                                       dtype, op, communicator_.handle(), stream_),
                 "ncclReduceScatter");
  }
  const char* const in = static_cast<const char*>(input.data);
  const std::vector<int64_t> begin = scattered(input, size);
  for (int r = 0; r < size; ++r) {
    const int64_t count = (begin[r + 1] - begin[r]) / size_of(input.dtype);
    if (count == 0) continue;
    check(nccl().reduce(in + begin[r], request.outputs[i], count, dtype, op, r,
                        communicator_.handle(), stream_),
          "ncclReduce");
  }
}

}  // namespace hvd
