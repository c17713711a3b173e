#include "core/kind_transport.h"

namespace hvd {

Status KindTransport::run(Request& request, const Waiting& waiting) {
  waiting_ = waiting;
  switch (request.kind) {
    case Kind::allreduce:
      request.reduction == Reduction::adasum ? adasum(request) : allreduce(request);
      return {};
    case Kind::broadcast:
      broadcast(request);
      return {};
    case Kind::allgather:
      return allgather(request);
    case Kind::alltoall:
      return alltoall(request);
    case Kind::reducescatter:
      return reducescatter(request);
    case Kind::barrier:
      return {};  // to have agreed on it is to have met
    case Kind::join:
      break;
  }
  void* last = nullptr;  // who came last is known: the engine has made it the root
  const Status status = request.allocate(0, {}, &last);
  if (status.ok()) *static_cast<int32_t*>(last) = request.root;
  return status;
}

}  // namespace hvd
