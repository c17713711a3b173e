// The stage of an allreduce between hosts, for one slice: each host starts with its own sum, and
// ends with the sum over all hosts, bit for bit the same. For H hosts and n bytes, each host sends
// and receives 2(H-1)/H n (slightly more in an uneven grid), which is the minimum (Patarasuk and
// Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
#pragma once

#include <mpi.h>

#include <memory>

#include "core/base/settings.h"
#include "core/cpu/mpi_wait.h"
#include "core/math/loops.h"

namespace hvd {

struct Slice {
  char* data;  // this host's sum, and then that of all
  int64_t elements;
  DType dtype;
  Reduction reduction;
  Factors factors;  // for the sum over all hosts
};

// Messages between hosts, and what becomes of them.
class InterHostExchange : protected Messages {
 public:
  using Messages::Messages;
  virtual ~InterHostExchange() = default;

  // Makes progress without waiting. Returns whether it made any.
  virtual bool advance() = 0;

  bool done() const { return done_; }

 protected:
  bool done_ = false;
};

// The communicator has one rank of each host, in the hosts' order. Allreduces in flight at the same
// time have tags that differ by more than 1, and start in the same order on all hosts.
std::unique_ptr<InterHostExchange> new_inter_host_allreduce(Allreduce algorithm, MPI_Comm hosts,
                                                            const Slice& slice, int tag);

// Allgather of small blocks in ceil(log2 N) steps for N ranks, each of one message from each rank (Bruck
// et al., 1997, https://doi.org/10.1109/71.642949). `blocks` has room for N, of `bytes` each: this
// rank's comes first, and those of the ranks after it follow, and then of rank 0 and the next ones.
std::unique_ptr<InterHostExchange> new_small_allgather(MPI_Comm ranks, void* blocks, int64_t bytes,
                                                       int tag);

// How many hosts' sums an intermediate sum may hold that is rounded to the slice's dtype.
int most_rounded(Allreduce algorithm, int hosts);

// What `automatic` stands for; others stand for themselves.
Allreduce algorithm_for(Allreduce asked, int hosts);

}  // namespace hvd
