// The stage of an allreduce between hosts, for one slice: each host starts with its own sum, and
// ends with the sum over all hosts, bit for bit the same. For H hosts and n bytes, each host sends
// and receives 2(H-1)/H n (slightly more in an uneven grid), which is the minimum (Patarasuk and
// Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
#pragma once

#include <mpi.h>

#include <algorithm>
#include <functional>
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
  int root = -1;    // the host that needs the sum; -1: all
};

// What is at most so much, from all hosts, goes to all: that takes fewer messages, and less time
// than their latencies.
constexpr int64_t kGatheredBytes = 64 << 10;

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

// What the hosts (or ranks) of a communicator propose, and their terms of small sums, which travel
// along. By recursive doubling the hosts reduce the summaries and gather the terms, in log2 H steps
// of one message from each host, and two more if H is no power of two (Thakur et al., 2005,
// https://doi.org/10.1177/1094342005051521). Used again and again.
class ProposalExchange : public InterHostExchange {
 public:
  static constexpr int64_t kMostAlong = 8 << 10;
  struct Message {
    Summary summary;
    char along[kMostAlong];
  };

  ProposalExchange(MPI_Comm hosts, int tag);

  // How many bytes of each host travel along, at most.
  static int64_t most_along(int hosts) { return std::min(kMostAlong, kGatheredBytes / hosts); }

  // `bytes`: how many do, the same on all hosts if they propose the same.
  void start(const Summary& mine, const char* along, int64_t bytes);
  void end() { started_ = false; }
  bool started() const { return started_; }

  bool advance() override;

  // Of all hosts, until the next start().
  const Summary& all() const { return all_.summary; }
  // Of any host, until the next start(), if all propose the same.
  const char* along(int host) const { return all_.along + place(host) * along_; }

 private:
  struct Part {  // the summary and the terms of some hosts
    Summary summary;
    char along[kGatheredBytes];
  };
  struct Places {
    int begin, end;
  };

  void step();
  int place(int host) const;
  Places places(int first, int hosts) const;
  int64_t bytes(const Places& places) const { return (places.end - places.begin) * along_; }
  void send_part(const Places& places, int to);
  void receive_part(const Places& places, int from);
  void add_received();

  // `power_` hosts exchange. The `beyond_` others give to them what they have, and get the result.
  const int tag_, host_, size_, power_, beyond_;
  Part all_, sent_, received_;
  Places coming_ = {0, 0};  // in received_
  int64_t along_ = 0;
  int step_ = 0;
  bool started_ = false;
};

// Of bytes that all hosts have, the same number from each and at most kGatheredBytes of all: calls
// `then` when those of all hosts are along().
class Gathered : public ProposalExchange {
 public:
  using Then = std::function<void(const Gathered&)>;
  Gathered(MPI_Comm hosts, const char* mine, int64_t bytes, int tag, Then then);
  bool advance() override;

 private:
  const Then then_;
};

// Whether all hosts add all terms, in the hosts' order, whatever the algorithm.
bool is_gathered(const Slice& slice, int hosts);

// How many hosts' sums an intermediate sum may hold that is rounded to the slice's dtype.
int most_rounded(Allreduce algorithm, int hosts);

// What `automatic` stands for; others stand for themselves.
Allreduce algorithm_for(Allreduce asked, int hosts);

}  // namespace hvd
