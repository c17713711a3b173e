// What the engine needs of a way to reach the other ranks of its process set.
// All calls come from the engine's thread alone, but for arrive(). Those that have a `waiting` are
// collective.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "core/request.h"
#include "core/status.h"

namespace hvd {

// Called now and then in a wait for other ranks: with the seconds without progress, and the ranks
// (of the job) that have not come this far. A text that it returns ends the wait, on all ranks.
using Waiting = std::function<std::string(double seconds, const std::vector<int>& missing)>;

// The ranks wait no more, for the reason that one of them gave. The transport is useless now:
// messages are still under way.
class Lost : public std::exception {
 public:
  explicit Lost(std::string why) : why_(std::move(why)) {}
  const char* what() const noexcept override { return why_.c_str(); }

 private:
  const std::string why_;
};

// What a rank has done since the agreement before: sums over the requests that it served, which are
// the same on all ranks. Who waited least came last.
struct Past {
  uint64_t waited_ns = 0;  // from when it was ready for a request until all ranks agreed on it
  uint64_t ran_ns = 0;
  uint64_t bytes = 0;  // that it gave
};

// What a rank puts on the table to agree on its next request.
struct Ballot {
  uint64_t fingerprint = 0;
  Past past;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const std::vector<int>& ranks() const = 0;  // of the job, by rank of the set
  virtual int rank() const = 0;                       // of the set
  virtual const std::string& host(int rank) const = 0;
  int size() const { return static_cast<int>(ranks().size()); }

  // Called by the thread that submits, when it does: notes what of a request must be noted then.
  // Why it cannot run, or nothing.
  virtual std::string arrive(Request& request) {
    if (request.device == kOnHost) return "";
    return "got a tensor on a GPU, and this transport knows only the host's memory.";
  }

  // Every rank's ballot, by rank of the set. Waits for the slowest without burning a core.
  virtual std::vector<Ballot> agree(const Ballot& mine, const Waiting& waiting) = 0;

  // Every rank's bytes, by rank of the set.
  virtual std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) = 0;

  // Moves the data of a request that all ranks have agreed on.
  virtual Status run(Request& request, const Waiting& waiting) = 0;

  // Tells all ranks, wherever they are, that this one cannot go on; they lose each other. Throws
  // Lost.
  virtual void give_up(const std::string& why) = 0;

  // Throws Lost if another rank has done so.
  virtual void listen() = 0;

  // Whether something that was begun goes on without the engine. To be asked now and then while it
  // does, for then it may fail: throws Lost.
  virtual bool busy() { return false; }
};

}  // namespace hvd
