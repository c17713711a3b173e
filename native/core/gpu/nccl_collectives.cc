#include "core/gpu/nccl_collectives.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "core/math/layout.h"
#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

int64_t row_elements(const Input& input) {
  Shape row = input.shape;
  row[0] = 1;
  return elements(row);
}

const char* at(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }

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
    // One factor, rounded to the dtype, on each input.
    double scalar = 0;  // as large as any
    store(dtype, factor, &scalar);
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
  // The number in the memory form of the dtype, which is a floating one: problem() refuses others.
  static void store(DType dtype, double factor, void* out) {
    switch (dtype) {
      case DType::float64:
        std::memcpy(out, &factor, sizeof factor);
        return;
      case DType::float32: {
        const float narrow = static_cast<float>(factor);
        std::memcpy(out, &narrow, sizeof narrow);
        return;
      }
      default: {  // of 16 bits: 1 in that dtype, scaled by reduce(), which rounds to nearest
        const uint16_t unit = dtype == DType::float16 ? 0x3c00 : 0x3f80;
        const void* source = &unit;
        loops().reduce(dtype, Reduction::sum, {factor, 1, 1}, &source, 1, 1, out);
      }
    }
  }

  NcclCommunicator& communicator_;
  int number_ = kNcclSum;
  bool made_ = false;
};

bool NcclCollectives::can(const Request& request) {
  const auto known = {Kind::allreduce, Kind::broadcast, Kind::allgather, Kind::alltoall,
                      Kind::reducescatter};
  if (std::find(known.begin(), known.end(), request.kind) == known.end()) return false;
  if (!collective(request.kind).reduces) return true;
  if (request.reduction == Reduction::adasum) return false;
  if (request.wire != DType::float64) return false;  // NCCL does not round
  const bool sums = request.reduction == Reduction::sum || request.reduction == Reduction::average;
  if (!sums && (request.prescale != 1.0 || request.postscale != 1.0)) return false;
  return std::all_of(request.inputs.begin(), request.inputs.end(),
                     [](const Input& input) { return nccl_dtype(input.dtype) >= 0; });
}

Status NcclCollectives::run(Request& request, const Waiting& waiting, const Pause& pause,
                            const std::function<void()>& allocated) {
  if (request.kind == Kind::allreduce || request.kind == Kind::broadcast) {
    request.kind == Kind::allreduce ? allreduce(request, pause) : broadcast(request, pause);
    return {};
  }
  const int size = host_.size();
  std::vector<int64_t> rows;
  std::vector<std::vector<int64_t>> bytes;
  std::vector<Part> sent, received;
  Status status;
  if (request.kind == Kind::allgather) {
    for (const Input& input : request.inputs) rows.push_back(input.shape[0]);
    rows = gather_numbers(rows, waiting);
    status = allocate_gathered(request, rows, size, &bytes);
  } else if (request.kind == Kind::alltoall) {
    for (size_t i = 1; i < request.inputs.size(); i += 2) {
      const int64_t* own = static_cast<const int64_t*>(request.inputs[i].data);
      rows.insert(rows.end(), own, own + size);
    }
    rows = gather_numbers(rows, waiting);
    status = allocate_exchanged(request, rows, host_.rank(), size, &sent, &received);
  } else {
    status = allocate_scattered(request, host_.rank(), size);
  }
  status =
      all_or_none(status, gather_numbers({status.ok() ? 0 : 1}, waiting), host_.ranks(), request);
  if (!status.ok()) return status;
  allocated();
  if (request.kind == Kind::reducescatter) {
    reducescatter(request, pause);
  } else {
    communicator_.group(
        [&] {
          request.kind == Kind::allgather ? allgather(request, bytes) : alltoall(sent, received);
        },
        pause);
  }
  return {};
}

void NcclCollectives::allreduce(const Request& request, const Pause& pause) {
  std::map<DType, Operation> operations;
  for (const Input& input : request.inputs) {
    if (input.bytes() > 0)
      operations.try_emplace(input.dtype, communicator_, request, input.dtype, host_.size());
  }
  if (operations.empty()) return;
  communicator_.group(
      [&] {
        for (size_t i = 0; i < request.inputs.size(); ++i) {
          const Input& input = request.inputs[i];
          if (input.bytes() == 0) continue;
          check(nccl().all_reduce(input.data, request.outputs[i], elements(input.shape),
                                  nccl_dtype(input.dtype), operations.at(input.dtype).number(),
                                  communicator_.handle(), stream_),
                "ncclAllReduce");
        }
      },
      pause);
}

void NcclCollectives::broadcast(const Request& request, const Pause& pause) {
  const std::vector<int>& ranks = host_.ranks();
  const int root =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), request.root) - ranks.begin());
  communicator_.group(
      [&] {
        for (size_t i = 0; i < request.inputs.size(); ++i) {
          const Input& input = request.inputs[i];
          if (input.bytes() == 0) continue;
          check(nccl().broadcast(input.data, request.outputs[i], input.bytes(), kNcclBytes, root,
                                 communicator_.handle(), stream_),
                "ncclBroadcast");
        }
      },
      pause);
}

// ncclAllGather needs equal sizes; otherwise one broadcast per rank.
void NcclCollectives::allgather(const Request& request,
                                const std::vector<std::vector<int64_t>>& bytes) {
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const std::vector<int64_t>& of_ranks = bytes[i];
    const void* in = request.inputs[i].data;
    const int64_t most = *std::max_element(of_ranks.begin(), of_ranks.end());
    if (most == 0) continue;
    if (most == *std::min_element(of_ranks.begin(), of_ranks.end())) {
      check(nccl().all_gather(in, request.outputs[i], most, kNcclBytes, communicator_.handle(),
                              stream_),
            "ncclAllGather");
      continue;
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
}

void NcclCollectives::alltoall(const std::vector<Part>& sent, const std::vector<Part>& received) {
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
void NcclCollectives::reducescatter(const Request& request, const Pause& pause) {
  const int size = host_.size();
  std::map<DType, Operation> operations;
  for (const Input& input : request.inputs)
    operations.try_emplace(input.dtype, communicator_, request, input.dtype, size);
  communicator_.group(
      [&] {
        for (size_t i = 0; i < request.inputs.size(); ++i) {
          const Input& input = request.inputs[i];
          if (input.bytes() == 0) continue;
          const int dtype = nccl_dtype(input.dtype), op = operations.at(input.dtype).number();
          if (input.shape[0] % size == 0) {
            check(
                nccl().reduce_scatter(input.data, request.outputs[i], elements(input.shape) / size,
                                      dtype, op, communicator_.handle(), stream_),
                "ncclReduceScatter");
            continue;
          }
          const int64_t row = row_elements(input);
          const int64_t width = static_cast<int64_t>(size_of(input.dtype));
          for (int r = 0; r < size; ++r) {
            const int64_t first = first_row(input.shape[0], r, size) * row;
            const int64_t count = first_row(input.shape[0], r + 1, size) * row - first;
            if (count == 0) continue;
            check(nccl().reduce(at(input.data, first * width), request.outputs[i], count, dtype, op,
                                r, communicator_.handle(), stream_),
                  "ncclReduce");
          }
        }
      },
      pause);
}

// Allgather of numbers, equally many from each rank.
std::vector<int64_t> NcclCollectives::gather_numbers(const std::vector<int64_t>& mine,
                                                     const Waiting& waiting) {
  const size_t bytes = mine.size() * sizeof(int64_t);
  std::string text(bytes, '\0');
  if (bytes > 0) std::memcpy(text.data(), mine.data(), bytes);
  std::vector<int64_t> all(mine.size() * host_.size());
  char* out = reinterpret_cast<char*>(all.data());
  for (const std::string& part : host_.gather(text, waiting)) {
    if (bytes > 0) std::memcpy(out, part.data(), bytes);
    out += bytes;
  }
  return all;
}

}  // namespace hvd
