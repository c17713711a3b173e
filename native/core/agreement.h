// What the ranks do next when their next requests differ. Pure: no threads, no messages, no clock.
//
// Every rank reports its queue; every rank feeds the same reports, ordered by rank, to decide(),
// and so comes to the same decision:
//
//   1. A request that is pending on all ranks with one signature runs, in the order of rank 0's
//   queue.
//   2. A request that is pending on all ranks with different signatures fails on all of them, and
//   the
//      message shows every rank's.
//   3. If neither exists and some rank waits for a request that a rank that has left did not
//   submit,
//      the program is broken: all that is pending fails, and so does all that comes later.
//   4. Otherwise the ranks wait for more requests and report again.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"

namespace hvd {

struct Pending {
  std::string identity;   // kind and name
  std::string signature;  // everything else that must be equal
};

struct Report {
  std::vector<Pending> queue;  // oldest first
  bool leaving = false;        // nothing will follow the queue
  std::string reason;          // of leaving
};

struct Refusal {
  std::string identity;
  std::string message;
};

struct Decision {
  std::vector<std::string> run;  // identities, in this order
  std::vector<Refusal> refuse;
  std::string left;  // not empty: why nothing can follow

  bool nothing() const { return run.empty() && refuse.empty() && left.empty(); }
};

Decision decide(const std::vector<Report>& reports);

// One line per rank, of what it waits for; for warnings.
std::string summary(const std::vector<Report>& reports);

std::string encode(const Report& report);
Report decode(const std::string& bytes);

}  // namespace hvd
