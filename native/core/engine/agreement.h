// Decides what the ranks do when their next requests differ. Pure: no threads, messages or clock.
// What the ranks report is combined pairwise, in any order. Every rank passes the result to
// decide(), and so makes the same decision:
//
//   1. A request that is pending on all ranks with one signature runs; a rank that has joined need
//      not have submitted it. Requests run in the order of the first rank's queue. A join is not
//      negotiated: it ends when it is the next request of all ranks.
//   2. A request that is pending on all ranks, but with different signatures or a problem on some,
//      fails on all of them, and the message shows the ranks'.
//      One that is pending on some ranks only, and whose step has failed on one of these, fails on
//      these.
//   3. If neither exists and some rank waits for a request that a rank that has left did not
//      submit, the program is broken: all that is pending fails, and so do all later requests.
//   4. If every rank has something pending, and no rank's queue has changed for a long time, the
//      ranks have diverged: all that they have reported fails. Later requests may run.
//   5. If a rank has waited for too long, all fails as in 3.
//   6. Otherwise the ranks wait for more requests and report again.
//
// What is not pending on some ranks will not run now. So a digest has no more requests than the
// shortest queue, whatever the number of ranks. It has hashes; a second exchange, of texts, follows
// only if some will be shown or ranks that have joined take part (texts.h).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
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
  int needs = nobody;     // the rank that must not have joined; the signature has it, too
  bool failed = false;    // another op of its step has failed
};

// Of one rank.
struct Report {
  int number = 0;              // in the set
  int rank = 0;                // in the job
  std::string host;            // its name
  std::vector<Pending> queue;  // oldest first
  bool had_joined = false;     // at the last negotiation
  bool leaving = false;        // nothing will follow the queue
  bool warns = false;          // this rank is about to print what the ranks wait for
  std::string reason;          // of leaving: "left the job: ..."
  double unchanged = 0;        // seconds since the queue changed, if over HVD_MISMATCH_SECONDS
  double waited = 0;           // seconds without progress, if over the timeout

  bool joined() const;
};

uint64_t hash_of(const std::string& text);

// The first request of each identity, by its hash; a later one waits for its turn.
std::unordered_map<uint64_t, const Pending*> heads(const Report& report);

// What some ranks report.
struct Digest {
  // A request that is pending on all of them that have not joined.
  struct Row {
    uint64_t identity = 0, signature = 0;  // hashes
    int owner = 0;                         // the first rank that has it, by number in the set,
    int place = 0;                         // and where in its queue
    int needs = Pending::nobody;
    bool differs = false, has_problem = false;
    bool lacks = false;       // some have joined without it
    bool has_needed = false;  // the rank that it needs has it; of everybody, none has

    template <typename Bytes>
    void fields(Bytes& bytes) {
      bytes(identity, signature, owner, place, needs, differs, has_problem, lacks, has_needed);
    }
  };

  Digest() = default;
  explicit Digest(const Report& report);
  void add(const Digest& other);
  template <typename Bytes>
  void fields(Bytes& bytes) {
    bytes(rows, failed, left, leaving, warns, absent, newly_joined, unchanged, waited);
  }

  std::vector<Row> rows;         // in the order of the first rank's queue
  std::vector<uint64_t> failed;  // identities, of which another op of the step has failed; sorted
  std::vector<uint64_t> left;    // identities that all ranks that leave have submitted; sorted
  bool leaving = false;          // any of them
  bool warns = false;            // any of them
  int absent = -1;               // the last rank that has not joined; -1: all have
  int newly_joined = -1;         // the last that has since the last negotiation
  double unchanged = std::numeric_limits<double>::infinity();  // the least; 0: a queue is empty
  double waited = 0;                                           // the most
};

struct Refusal {
  enum Why { problem, differs, lacks, failed };

  uint64_t identity = 0;
  Why why = problem;
  int needs = Pending::nobody;
  std::string message = {};

  Code code() const;
};

struct Step {
  uint64_t identity = 0;
  int owner = 0;  // the first rank that has submitted it, by number in the set
  std::string header = {};
};

struct Decision {
  std::vector<Step> run;  // in this order
  std::vector<Refusal> refuse;
  bool some_joined = false;  // a rank takes part in what runs without having submitted it
  bool needs_texts = false;  // what follows, and messages and headers, come of these
  std::string mismatch;      // not empty: all that was reported fails with this
  std::string left;          // not empty: who left, so that all fails
  std::string stuck;         // not empty: who waits for what for too long, so that all fails
  std::string summary;       // what each rank waits for, for warnings

  bool nothing() const {
    return run.empty() && refuse.empty() && mismatch.empty() && left.empty() && stuck.empty();
  }
};

Decision decide(const Digest& all);

}  // namespace hvd
