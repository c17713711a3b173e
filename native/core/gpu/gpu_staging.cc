#include "core/gpu/gpu_staging.h"

#include <algorithm>
#include <thread>

#include "core/base/clock.h"
#include "core/request/collectives.h"

// Of Open MPI and MPICH, where they have it.
extern "C" __attribute__((weak)) int MPIX_Query_cuda_support(void);

namespace hvd {
namespace {

constexpr size_t kPartBytes = 4 << 20;
constexpr size_t kSlots = 4;  // parts under way: two to the host, one among the ranks, one back
constexpr size_t kAlignment = 64;     // of pieces in a slot, as of tensors
constexpr double kLastSeconds = 1.0;  // for copies after a failure

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t staged_bytes(const Request& part) {
  size_t bytes = 0;
  for (const Input& input : part.inputs) bytes += aligned(input.bytes());
  return bytes;
}

void wait_for(const Gpu& gpu, const Event& event, const Pause& pause) {
  while (!gpu.finished(event)) pause();
}

// The host waits for the work that is in the stream now.
void wait_for(Gpu& gpu, CudaStream stream, const Pause& pause) {
  wait_for(gpu, gpu.record(stream), pause);
}

// Page-locked memory that one part after the other uses.
struct Slot {
  Memory memory;
  Request staged;  // the part that uses it now
  Event in, out;   // after its copies
};

// The part, of which each piece is at its place in the slot.
Request in_slot(const Request& part, const Slot& slot) {
  Request staged = part;
  staged.device = kOnHost;
  char* place = static_cast<char*>(slot.memory.get());
  for (size_t i = 0; i < part.inputs.size(); ++i) {
    staged.inputs[i].data = staged.outputs[i] = place;
    place += aligned(part.inputs[i].bytes());
  }
  return staged;
}

// After a failure: copies under way need no other rank, and must not outlive their streams.
void let_copies_end(Gpu& gpu) {
  const auto start = Clock::now();
  gpu.wait(gpu.stream(), gpu.record(gpu.back_stream()));
  const Event last = gpu.record(gpu.stream());
  while (!gpu.finished(last) && seconds_since(start) < kLastSeconds) std::this_thread::yield();
}

Status run_parts(Gpu& gpu, Transport& host, const std::vector<Request>& parts,
                 const Waiting& waiting, const Pause& pause, std::vector<Memory>* held) {
  Slot slots[kSlots];
  const CudaStream in = gpu.stream(), out = parts.size() > 1 ? gpu.back_stream() : in;
  const size_t bytes = parts.size() > 1 ? kPartBytes : staged_bytes(parts[0]);
  Status status;
  size_t copied = 0;
  for (size_t p = 0; p < parts.size() && status.ok(); ++p) {
    for (; copied < std::min(parts.size(), p + kSlots); ++copied) {
      Slot& slot = slots[copied % kSlots];
      if (!slot.memory) held->push_back(slot.memory = gpu.pinned(bytes));
      if (slot.out) gpu.wait(in, slot.out);
      slot.staged = in_slot(parts[copied], slot);
      for (size_t i = 0; i < parts[copied].inputs.size(); ++i) {
        const Input& input = parts[copied].inputs[i];
        gpu.copy(slot.staged.outputs[i], input.data, input.bytes(), in);
      }
      slot.in = gpu.record(in);
    }
    Slot& slot = slots[p % kSlots];
    wait_for(gpu, slot.in, pause);
    status = host.run(slot.staged, waiting);
    if (!status.ok()) break;
    for (size_t i = 0; i < parts[p].inputs.size(); ++i) {
      gpu.copy(parts[p].outputs[i], slot.staged.outputs[i], parts[p].inputs[i].bytes(), out);
    }
    slot.out = gpu.record(out);
  }
  for (const Slot& slot : slots)
    if (slot.out && out != in) gpu.wait(in, slot.out);
  return status;
}

}  // namespace

std::vector<Request> parts_of(const Request& request) {
  if (!collective(request.kind).keeps_shape || request.reduction == Reduction::adasum)
    return {request};
  std::vector<Request> parts;
  size_t room = 0;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    for (size_t begin = 0, end; begin < input.bytes(); begin = end) {
      if (room == 0) {
        Request& part = parts.emplace_back(request);
        part.inputs.clear();
        part.outputs.clear();
        room = kPartBytes;
      }
      // Room is a multiple of the alignment, and so of an element.
      end = std::min(input.bytes(), begin + room);
      const int64_t count = (end - begin) / size_of(input.dtype);
      const auto* const data = static_cast<const char*>(input.data) + begin;
      parts.back().inputs.push_back({data, input.dtype, {count}});
      parts.back().outputs.push_back(static_cast<char*>(request.outputs[i]) + begin);
      room -= aligned(end - begin);
    }
  }
  return parts.empty() ? std::vector<Request>{request} : parts;
}

Status run_on_host(Gpu& gpu, Transport& host, Request& request, const Waiting& waiting,
                   const Pause& pause, const std::function<void()>& allocated,
                   std::vector<Memory>* held) {
  if (collective(request.kind).keeps_shape) {
    try {
      return run_parts(gpu, host, parts_of(request), waiting, pause, held);
    } catch (...) {
      let_copies_end(gpu);
      throw;
    }
  }
  struct Copy {
    void* device;
    const void* staged;
    size_t bytes;
  };
  std::vector<Copy> back;
  Request staged = request;
  staged.device = kOnHost;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    if (is_splits(request.kind, i)) continue;
    const Memory memory = gpu.pinned(input.bytes());
    held->push_back(memory);
    gpu.copy(memory.get(), input.data, input.bytes());
    staged.inputs[i].data = memory.get();
  }
  wait_for(gpu, gpu.stream(), pause);

  staged.allocate = [&](size_t index, const Shape& shape, void** data) {
    void* own = nullptr;
    if (Status status = request.allocate(index, shape, &own); !status.ok()) return status;
    *data = own;
    if (is_splits(request.kind, index)) return Status();
    const size_t bytes = elements(shape) * size_of(request.inputs[index].dtype);
    held->push_back(gpu.pinned(bytes));
    *data = held->back().get();
    back.push_back({own, *data, bytes});
    return Status();
  };
  if (Status status = host.run(staged, waiting); !status.ok()) return status;
  allocated();
  for (const Copy& copy : back) gpu.copy(copy.device, copy.staged, copy.bytes);
  return {};
}

bool mpi_knows_gpus() { return MPIX_Query_cuda_support && MPIX_Query_cuda_support() == 1; }

bool can_run_over_mpi(Kind kind) { return kind == Kind::allgather || kind == Kind::broadcast; }

Status run_over_mpi(Gpu& gpu, Transport& mpi, Request& request, const Waiting& waiting,
                    const Pause& pause, CudaStream framework) {
  Request direct = request;
  direct.device = kOnHost;
  if (request.kind == Kind::broadcast) {
    // In place, or the host would copy the root's.
    const bool is_root = mpi.ranks()[mpi.rank()] == request.root;
    for (size_t i = 0; i < request.inputs.size(); ++i) {
      const Input& input = request.inputs[i];
      if (is_root && input.data != request.outputs[i])
        gpu.copy(request.outputs[i], input.data, input.bytes());
      direct.inputs[i].data = request.outputs[i];
    }
  }
  wait_for(gpu, gpu.stream(), pause);
  direct.allocate = [&](size_t index, const Shape& shape, void** data) {
    const Status status = request.allocate(index, shape, data);
    // Earlier work of the framework's stream may still use this memory.
    if (status.ok()) wait_for(gpu, framework, pause);
    return status;
  };
  return mpi.run(direct, waiting);
}

}  // namespace hvd
