// A collective as it travels from a framework's kernel through the engine to a transport.
// The only type that frameworks and the core exchange.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"

namespace hvd {

enum class Kind : uint8_t {
  allreduce,
  allgather,
  broadcast,
  alltoall,
  reducescatter,
  reduce,
  barrier,
  join,
};

// Whether the result is one sum, or the like, of all ranks' tensors.
inline bool adds_up(Kind kind) { return kind == Kind::allreduce || kind == Kind::reduce; }

using Shape = std::vector<int64_t>;

// Where a request's tensors are, if not on the CUDA device of a number.
constexpr int kOnHost = -1;
constexpr int kOnSomeDevice = -2;  // the other ranks' are; this one has joined

inline int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

// Whether this input or output holds the number of rows per rank.
inline bool is_splits(Kind kind, size_t index) { return kind == Kind::alltoall && index % 2 == 1; }

struct Input {
  const void* data = nullptr;
  DType dtype = DType::float32;
  Shape shape;

  size_t bytes() const { return elements(shape) * size_of(dtype); }
  template <typename Bytes>
  void fields(Bytes& bytes) {
    bytes(dtype, shape);
  }
};

struct Request {
  Kind kind = Kind::allreduce;
  int process_set = 0;
  std::string name;
  // For alltoall, tensors and their splits in turn: int64, one number of rows per rank of the set.
  std::vector<Input> inputs;

  // One buffer per output. Set by the kernel where the output has the input's shape (it may then be
  // the input's own memory); otherwise the transport asks `allocate` for each.
  std::vector<void*> outputs;
  std::function<Status(size_t index, const Shape& shape, void** data)> allocate;

  // Where all inputs and outputs are, except splits, which are always in the host's memory. On a
  // device: the CUDA stream that makes the inputs and will use the outputs, and the event after
  // which the inputs may be read (set by Transport::prepare).
  int device = kOnHost;
  void* stream = nullptr;
  std::shared_ptr<void> ready;

  // Whether work that the stream gets after done() waits for the outputs. Otherwise that which it
  // gets after wait_for_requests() (kernel_api.h) does, and `memory` lives until then, at least.
  bool waits = true;
  std::shared_ptr<void> memory;

  Reduction reduction = Reduction::sum;  // of those that reduce
  double prescale = 1.0;                 // factor on every rank's input
  double postscale = 1.0;                // factor on the result
  // The widest floating-point dtype that is sent: tensors of wider dtypes are rounded to it before
  // they are sent and summed. For allreduce, except Adasum.
  DType wire = DType::float64;
  int root = 0;  // broadcast, reduce: a rank of the job; join: the last to join, set by the engine

  std::string note;  // text that must be equal on all ranks, too

  // Why this rank's kernel cannot run it, as when its output cannot be allocated: an error on all
  // ranks.
  std::string problem;

  // Keeps the memory of inputs and outputs for ever. Called before done() if the transport was
  // aborted in the middle: messages that come late are still written there.
  std::function<void()> keep;

  // Set when another op of the same step has failed on this rank; null: never.
  std::shared_ptr<const std::atomic<bool>> step_failed;

  // Called exactly once, on the engine's thread or in submit.
  std::function<void(const Status&)> done;
};

// Of this rank, before they are rounded for the wire.
inline uint64_t input_bytes(const Request& request) {
  uint64_t bytes = 0;
  for (const Input& input : request.inputs) bytes += input.bytes();
  return bytes;
}

}  // namespace hvd
