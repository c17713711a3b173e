#include "core/gpu/gpu_staging.h"

#include "core/request/collectives.h"

// Of Open MPI and MPICH, where they have it.
extern "C" __attribute__((weak)) int MPIX_Query_cuda_support(void);

namespace hvd {
namespace {

// The host waits for the work that is in the stream now.
void wait_for(Gpu& gpu, CudaStream stream, const Pause& pause) {
  const Event event = gpu.record(stream);
  while (!gpu.finished(event)) pause();
}

}  // namespace

Status run_on_host(Gpu& gpu, Transport& host, Request& request, const Waiting& waiting,
                   const Pause& pause, const std::function<void()>& allocated,
                   std::vector<Memory>* held) {
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
    if (!collective(request.kind).keeps_shape) continue;
    staged.outputs[i] = memory.get();
    back.push_back({request.outputs[i], memory.get(), input.bytes()});
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
  if (!collective(request.kind).keeps_shape) allocated();
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
