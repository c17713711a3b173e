// Decides what the ranks do when their next requests differ. Pure: no threads, messages or clock.
// Every rank reports its queue to all. Every rank passes the same reports, in rank order, to
// decide(), and so makes the same decision:
//
//   1. A request that is pending on all ranks with one signature runs; a rank that has joined need
//      not have submitted it. Requests run in the order of the first rank's queue. A join is not
//      negotiated: it ends when it is the next request of all ranks.
//   2. A request that is pending on all ranks, but with different signatures or a problem on some,
//      fails on all of them, and the message shows every rank's.
//      One that is pending on some ranks only, and whose step has failed on one of these, fails on
//      these.
//   3. If neither exists and some rank waits for a request that a rank that has left did not
//      submit, the program is broken: all that is pending fails, and so do all later requests.
//   4. If every rank has something pending, and no rank's queue has changed for a long time, the
//      ranks have diverged: all that they have reported fails. Later requests may run.
//   5. If a rank has waited for too long, all fails as in 3.
//   6. Otherwise the ranks wait for more requests and report again.
//
// Reports travel briefly first: hashes in place of texts, some 60 bytes for each request, because
// every rank gets those of all.
#pragma once

#include <string>
#include <vector>

#include "core/base/status.h"

namespace hvd {

struct Pending {
  enum Needs { nobody = -1, everybody = -2 };

  std::string identity;   // kind and name
  std::string signature;  // everything else that must be equal
  std::string problem;    // not empty: why it cannot run
  std::string header;     // for ranks that have joined, see collectives.h
  bool joins = false;     // the end of what this rank submits
  int needs = nobody;     // the rank that must not have joined
  bool failed = false;    // another op of its step has failed
};

struct Report {
  int rank = 0;                // in the job
  std::string host;            // its name
  std::vector<Pending> queue;  // oldest first
  bool leaving = false;        // nothing will follow the queue
  bool warns = false;          // this rank is about to print what the ranks wait for
  std::string reason;          // of leaving
  double unchanged = 0;        // seconds since the queue changed, if over HVD_MISMATCH_SECONDS
  double waited = 0;           // seconds without progress, if over the timeout

  bool joined() const;
};

struct Refusal {
  std::string identity;
  Code code;
  std::string message;
};

struct Step {
  std::string identity;
  std::string header;
  int owner = 0;  // the first rank that has submitted it
};

struct Decision {
  std::vector<Step> run;  // in this order
  std::vector<Refusal> refuse;
  std::string mismatch;      // not empty: all that was reported fails with this
  std::string left;          // not empty: who left, so that all fails
  std::string stuck;         // not empty: who waits for what for too long, so that all fails
  bool some_joined = false;  // a rank takes part in what runs without having submitted it

  bool nothing() const {
    return run.empty() && refuse.empty() && mismatch.empty() && left.empty() && stuck.empty();
  }
};

Decision decide(const std::vector<Report>& reports);

// The same report with hashes for identities and signatures, and without headers.
Report brief(Report report);
std::string brief_identity(const std::string& identity);

// Whether a decision of brief reports must be made again of full ones, because texts come of it.
bool needs_texts(const Decision& decision, const std::vector<Report>& reports);

// One line per rank, of what it waits for; for warnings.
std::string summary(const std::vector<Report>& reports);

std::string encode(const Report& report);
Report decode(const std::string& bytes);

}  // namespace hvd
