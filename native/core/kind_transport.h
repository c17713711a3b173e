// A transport with a function of its own for each kind of request.
#pragma once

#include "core/transport.h"

namespace hvd {

class KindTransport : public Transport {
 public:
  Status run(Request& request, const Waiting& waiting) override;

 protected:
  virtual void allreduce(Request& request) = 0;
  virtual void adasum(Request& request) = 0;
  virtual void broadcast(Request& request) = 0;
  virtual Status allgather(Request& request) = 0;
  virtual Status alltoall(Request& request) = 0;
  virtual Status reducescatter(Request& request) = 0;

  Waiting waiting_;  // of the call in progress
};

}  // namespace hvd
