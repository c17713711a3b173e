// What the fake of NCCL does in a stream: collectives between the ranks of a communicator.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/gpu/nccl_api.h"
#include "core/math/loops.h"
#include "fake_cuda.h"
#include "wire.h"

namespace fake_cuda {

using hvd::DType;
using hvd::Reduction;

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
  std::string name;
  std::shared_ptr<Wire> wire;
  int rank, size, device;
  std::atomic<int> state{hvd::kNcclInProgress};
  std::atomic<int> running{0};  // groups in a stream
  std::atomic<bool> finalized{false};
};

// How many groups of each communicator of this process, by its name, are in streams before another.
using Order = std::map<std::string, int64_t>;

// Throws Aborted.
void run(const Comm& comm, const std::vector<Op>& ops, const Order& before);

}  // namespace fake_cuda
