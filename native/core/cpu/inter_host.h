// The stage of an allreduce between hosts, for one slice: each host starts with its own sum, and
// ends with the sum over all hosts, bit for bit the same. For H hosts and n bytes, each host sends
// and receives 2(H-1)/H n (slightly more in an uneven grid), which is the minimum (Patarasuk and
// Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "core/base/settings.h"
#include "core/cpu/mpi_wait.h"
#include "core/math/loops.h"
#include "core/request/transport.h"

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

// Allgather of small blocks in ceil(log2 N) steps for N ranks, each of one message from each rank
// (Bruck et al., 1997, https://doi.org/10.1109/71.642949). `blocks` has room for N, of `bytes`
// each: this rank's comes first, and those of the ranks after it follow, and then of rank 0 and the
// next.
std::unique_ptr<InterHostExchange> new_small_allgather(MPI_Comm ranks, void* blocks, int64_t bytes,
                                                       int tag);

// What the hosts (or ranks) of a communicator propose, and their terms of tiny sums, which travel
// along. Each step takes one message of each host, to one other: few hosts gather the messages of
// all, many reduce the summaries by recursive doubling, in up to two steps more (Thakur et al.,
// 2005, https://doi.org/10.1177/1094342005051521). Used again and again.
class ProposalExchange : protected Messages {
 public:
  // What travels along, at most: larger requests pay for these bytes, too.
  static constexpr int64_t kMostAlong = 128;
  struct Message {
    Summary summary;
    char along[kMostAlong];
  };

  ProposalExchange(MPI_Comm hosts, int few, int tag);

  bool is_few() const { return size_ <= few_; }
  int hosts() const { return size_; }

  // Of this host, to fill before start().
  Message& mine() { return messages_[0]; }
  void start();
  void end() { started_ = false; }
  bool started() const { return started_; }

  // Makes progress without waiting. Returns whether it made any.
  bool advance();
  bool done() const { return done_; }

  // Of all, until the next start().
  Summary all() const;
  // Of few hosts, until the next start().
  const char* along(int host) const { return messages_[(host + size_ - host_) % size_].along; }

 private:
  void step_of_many();

  const MPI_Comm comm_;
  const int few_, tag_, host_, size_;
  std::vector<Message> messages_;  // of few: of new_small_allgather()
  std::unique_ptr<InterHostExchange> gathering_;
  Summary all_, sent_, received_;  // of many
  int step_ = 0;
  bool started_ = false, done_ = false;
};

// Whether all hosts add all terms, in the hosts' order, whatever the algorithm.
bool is_gathered(const Slice& slice, int hosts);

// How many hosts' sums an intermediate sum may hold that is rounded to the slice's dtype.
int most_rounded(Allreduce algorithm, int hosts);

// What `automatic` stands for; others stand for themselves.
Allreduce algorithm_for(Allreduce asked, int hosts);

}  // namespace hvd
