// Interface through which the engine talks to the other ranks of its process set. The engine calls
// it from one thread at a time, except prepare(). Methods that take a `waiting` are collective.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/request/request.h"

namespace hvd {

// The ranks that are missing (numbers in the job). Found only when asked for: that takes as long as
// there are ranks.
using Missing = std::function<std::vector<int>()>;

// Called periodically while a rank waits for others, with the seconds without progress. If it
// returns a text, the wait is aborted on all ranks with it.
using Waiting = std::function<std::string(double seconds, const Missing& missing)>;

// A rank has aborted the transport, for this reason. The transport cannot be used any more, since
// messages are still in flight.
class Aborted : public std::exception {
 public:
  explicit Aborted(std::string why) : why_(std::move(why)) {}
  const char* what() const noexcept override { return why_.c_str(); }

 private:
  const std::string why_;
};

// What a rank proposes to run next.
struct Proposal {
  enum Flag : uint64_t {
    several_sets = 1  // this rank has several process sets, whose NCCL launches need an order
  };
  uint64_t fingerprint = 0;
  uint64_t flags = 0;
  // Since the previous agreement, summed over the requests that it served (the same ones on all
  // ranks): from when it was ready for one until all ranks agreed on it. The rank that waited least
  // arrived last.
  uint64_t waited_ns = 0;
};

// What some ranks propose, in a size that does not depend on their number.
struct Summary {
  Summary() = default;
  // Of one, by its number in the set.
  Summary(const Proposal& mine, int rank)
      : least(mine.fingerprint),
        most(mine.fingerprint),
        flags(mine.flags),
        waited(mine.waited_ns),
        waited_least(mine.waited_ns),
        last(rank) {}

  void add(const Summary& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
    flags |= other.flags;
    waited += other.waited;
    if (std::tie(other.waited_least, other.last) < std::tie(waited_least, last)) {
      waited_least = other.waited_least;
      last = other.last;
    }
  }
  bool all_propose(uint64_t fingerprint) const {
    return least == fingerprint && most == fingerprint;
  }

  uint64_t least = UINT64_MAX, most = 0;  // fingerprint
  uint64_t flags = 0;                     // of any
  uint64_t waited = 0;                    // by all together, in nanoseconds
  uint64_t waited_least = UINT64_MAX;     // by the rank that came last,
  uint64_t last = 0;                      // the first of those that waited so long
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const std::vector<int>& ranks() const = 0;  // of the job, by rank of the set
  virtual int rank() const = 0;                       // of the set
  virtual const std::string& host(int rank) const = 0;
  int size() const { return static_cast<int>(ranks().size()); }
  // Of a rank of the job that is in the set.
  int number_in_set(int of_job) const {
    return static_cast<int>(std::find(ranks().begin(), ranks().end(), of_job) - ranks().begin());
  }

  // Called on the thread that submits a request, for what must be recorded at that moment. Returns
  // why the request cannot run, or "".
  virtual std::string prepare(Request& request) {
    return request.device == kOnHost ? "" : why_no_gpu_;
  }

  // The error for tensors on GPUs.
  void set_why_no_gpu(std::string why) { why_no_gpu_ = std::move(why); }

  // What all ranks propose. Waits for the slowest without burning a core.
  //
  // `next`: what this rank proposes to run; null: nothing that it could. Small tensors may travel
  // with the proposals; so if all propose it, the next call must be run() of that request. Within
  // run(), too, with null, for the least and the most of numbers: the ranks' fingerprints.
  //
  // Without `waiting`, only if the others come within microseconds and run() takes little longer
  // than a change of threads. Otherwise nothing; then the next call must be agree() with the same
  // arguments and `waiting`, which goes on with it.
  virtual std::optional<Summary> agree(const Proposal& mine, const Request* next,
                                       const Waiting& waiting) = 0;

  // Every rank's bytes, by rank of the set.
  virtual std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) = 0;

  // Every rank's bytes, combined pairwise, in any order, to the same on all ranks. What is combined
  // should not grow with the number of ranks.
  using Combine = std::function<std::string(const std::string&, const std::string&)>;
  virtual std::string reduce(const std::string& mine, const Combine& combine,
                             const Waiting& waiting) {
    const std::vector<std::string> all = gather(mine, waiting);
    std::string some = all[0];
    for (int r = 1; r < size(); ++r) some = combine(some, all[r]);
    return some;
  }

  // Every rank's numbers, one rank's after the other's; equally many from each.
  virtual std::vector<int64_t> gather_numbers(const std::vector<int64_t>& mine,
                                              const Waiting& waiting) {
    const char* const data = reinterpret_cast<const char*>(mine.data());
    std::vector<int64_t> all;
    for (const std::string& part : gather({data, mine.size() * sizeof(int64_t)}, waiting)) {
      all.resize(all.size() + mine.size());
      std::memcpy(&all[all.size() - mine.size()], part.data(), part.size());
    }
    return all;
  }

  // Alltoall of numbers, equally many for each rank, one rank's after the other's.
  virtual std::vector<int64_t> exchange_numbers(const std::vector<int64_t>& mine,
                                                const Waiting& waiting) {
    const std::vector<int64_t> all = gather_numbers(mine, waiting);
    std::vector<int64_t> numbers;
    const size_t each = mine.size() / size();
    for (int r = 0; r < size(); ++r) {
      const auto from = all.begin() + r * mine.size() + rank() * each;
      numbers.insert(numbers.end(), from, from + each);
    }
    return numbers;
  }

  // Moves the data of a request that all ranks have agreed on.
  virtual Status run(Request& request, const Waiting& waiting) = 0;

  // The one that hands the memory of tensors to MPI as it is; null: there is none. Used in turn
  // with this one, and ends with it.
  virtual Transport* mpi() { return nullptr; }

  // Lets later work of a GPU's stream wait for the outputs of all requests that are done. From any
  // thread. Returns why it cannot, or "".
  virtual std::string wait_in(void* /*stream*/) { return ""; }

  // Aborts this transport on all ranks, whatever they are doing. Throws Aborted.
  virtual void abort(const std::string& why) = 0;

  // Throws Aborted if another rank has called abort().
  virtual void check_aborted() = 0;

  // Whether started work goes on without the engine. While it does, the engine calls this
  // periodically, since the work may fail: throws Aborted.
  virtual bool busy() { return false; }

 private:
  std::string why_no_gpu_ =
      "got a tensor on a GPU, and this transport knows only the host's memory.";
};

}  // namespace hvd
