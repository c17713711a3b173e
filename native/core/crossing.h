// A slice of an allreduce on its way between hosts: each host holds its own sum of it, and in the
// end every host holds the sum over all, bit for bit the same.
//
// For H hosts and n bytes, all ways but MPI's send 2(H-1)/H n from each host and receive as much,
// which is the least that is possible (Patarasuk and Yuan, 2009,
// https://doi.org/10.1016/j.jpdc.2008.09.002).
#pragma once

#include <mpi.h>

#include <memory>

#include "core/reduce.h"
#include "core/settings.h"

namespace hvd {

struct Slice {
  char* data;  // this host's sum, and then that of all
  int64_t elements;
  DType dtype;
  Reduction reduction;
  Factors factors;  // for the sum over all hosts
};

class Crossing {
 public:
  virtual ~Crossing() = default;

  // Does what can be done without waiting. Returns whether there was anything.
  virtual bool advance() = 0;

  bool done() const { return done_; }

 protected:
  bool done_ = false;
};

// The communicator has one rank of each host, in the hosts' order. Crossings under way at once
// have tags that differ by more than 1, and begin in the same order on all hosts.
std::unique_ptr<Crossing> new_crossing(Allreduce way, MPI_Comm hosts, const Slice& slice, int tag);

}  // namespace hvd
