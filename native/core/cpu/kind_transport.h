// A transport with one method per kind of request.
#pragma once

#include "core/request/collectives.h"
#include "core/request/transport.h"

namespace hvd {

class KindTransport : public Transport {
 public:
  Status run(Request& request, const Waiting& waiting) override {
    waiting_ = waiting;
    switch (request.kind) {
      case Kind::allreduce:
        return request.reduction == Reduction::adasum ? adasum(request) : allreduce(request);
      case Kind::broadcast:
        return broadcast(request);
      case Kind::allgather:
        return allgather(request);
      case Kind::alltoall:
        return alltoall(request);
      case Kind::reducescatter:
        return reducescatter(request);
      case Kind::barrier:
        return {};  // all ranks have agreed to run it, so all have arrived
      case Kind::join:
        return join(request);
    }
    return missing(request);
  }

 protected:
  virtual Status allreduce(Request& request) { return missing(request); }
  virtual Status adasum(Request& request) { return missing(request); }
  virtual Status broadcast(Request& request) { return missing(request); }
  virtual Status allgather(Request& request) { return missing(request); }
  virtual Status alltoall(Request& request) { return missing(request); }
  virtual Status reducescatter(Request& request) { return missing(request); }

  // Runs kinds that this transport does not implement; the same ones on all ranks.
  virtual Status missing(Request& request) {
    return Status::error(Code::internal,
                         identity(request) + " is not supported between these ranks.");
  }

  Waiting waiting_;  // of the call in progress

 private:
  // The engine has stored the last rank to join as the root.
  static Status join(Request& request) {
    void* last = nullptr;
    const Status status = request.allocate(0, {}, &last);
    if (status.ok()) *static_cast<int32_t*>(last) = request.root;
    return status;
  }
};

}  // namespace hvd
