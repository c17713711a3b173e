// Counters of the ranks of one host, in memory that they share, and waits for them.
//
// Every rank has a counter of each kind, which it alone increases. A rank waits until the counters
// of all ranks have reached a value: for some microseconds it spins, or yields to the other ranks
// that share its core, and then it sleeps in the kernel (futex). It leaves a note of what it waits
// for, so that the rank that increases the last counter wakes it, and no other rank does.
//
// Where a host has more ranks than a group (shared_atomic.h), each group has counters, too: the
// least of its ranks', which the last of them increases. A rank that waits reads those, and one
// that increases its counter those of its group, so a look costs ranks / group reads, not ranks.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/request/transport.h"

namespace hvd {

class HostCounters {
 public:
  enum Kind { arrived, packed, reduced, unpacked, kKinds };

  // By kind, the value that all ranks' counters should reach; kNever: not waited for.
  using Targets = std::array<uint64_t, kKinds>;
  static constexpr uint64_t kNever = UINT64_MAX;
  static constexpr Targets kNone = {kNever, kNever, kNever, kNever};

  // The memory that they take.
  static int64_t bytes(int ranks);

  // In the same memory, full of zeros, for all ranks; `ranks` are their numbers in the job.
  HostCounters(void* memory, int rank, std::vector<int> ranks, int ranks_per_core);

  int ranks_per_core() const { return ranks_per_core_; }

  // The least value of a counter among the first `ranks` ranks, or all.
  uint64_t least(Kind kind, int ranks) const;
  uint64_t least(Kind kind) const;

  // Increases this rank's counter, and wakes those who wait for that.
  void advance(Kind kind, uint64_t value);

  // Waits until all ranks have reached one of the targets. Throws Aborted.
  void wait(const Targets& targets, const Waiting& waiting);

  // The same, but returns false instead of sleeping.
  bool wait_briefly(const Targets& targets) const;

  bool aborted() const;

  // Throws Aborted if a rank has called abort().
  void check_aborted() const;

  // Aborts the waits of all ranks. Throws Aborted.
  [[noreturn]] void abort(const std::string& why);

 private:
  struct Header;
  struct Counters;
  struct PerRank;

  int size() const { return static_cast<int>(ranks_.size()); }
  static int groups(int ranks);  // 0: there are none
  template <typename Of>
  static uint64_t least(const Of* counters, Kind kind, int from, int to);
  void raise(int group, Kind kind);
  bool reached(const Targets& targets) const;
  std::vector<int> missing(const Targets& targets) const;
  void wake(Kind kind);

  const std::vector<int> ranks_;
  const int rank_;
  const int ranks_per_core_;
  Header* const header_;
  PerRank* const per_rank_;
  Counters* const per_group_;
};

}  // namespace hvd
