#include "core/gpu/gpu_staging.h"

#include "core/request/collectives.h"

namespace hvd {

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
  const Event copied = gpu.record(gpu.stream());
  while (!gpu.finished(copied)) pause();

  staged.allocate = [&](size_t index, const Shape& shape, void** data) {
    void* own = nullptr;
    if (Status status = request.allocate(index, shape, &own); !status.ok()) return status;
    *data = own;
    if (is_splits(request.kind, index)) return Status();
    const size_t bytes =
        static_cast<size_t>(elements(shape)) * size_of(request.inputs[index].dtype);
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

}  // namespace hvd
