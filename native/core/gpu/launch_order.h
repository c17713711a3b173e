// The order in which the process sets of a GPU launch NCCL's work.
//
// Two sets that share GPUs may launch in different orders on different ranks, since each set has an
// engine of its own. If a GPU then has room for the work of one set, and the next GPU for that of
// the other, both wait for ever. So all ranks launch in one order, and a GPU begins with the work
// of a set when that of the set before is finished.
//
// The order is that of Skeen's total-order multicast (Birman and Joseph, 1987,
// https://doi.org/10.1145/7351.7478): after a set's ranks have agreed on a request, each proposes
// the next number of its own clock, the request gets the greatest of them, and a rank launches it
// when no other request can get a lower one.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_api.h"

namespace hvd {

class LaunchOrder {
 public:
  // The numbers of all ranks of a set; collective.
  using Exchange = std::function<std::vector<int64_t>(int64_t mine)>;

  // That of a device of this process.
  static LaunchOrder& of(int device);

  // A request of a set, from before its launch until all of it is in the stream. Sets have the same
  // numbers on all ranks, and a set has one turn at a time.
  class Turn {
   public:
    // Waits for the turn. Throws what `exchange` or `pause` throws.
    Turn(LaunchOrder& order, int process_set, const Exchange& exchange, const Pause& pause);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    void become(int64_t number);

    LaunchOrder& order_;
    std::pair<int64_t, int> place_;
  };

  // The end of the work that was launched last, by any set; null: there was none.
  Event last();
  void set_last(const Event& done);

  // If this was the last, it is finished, and its event can go.
  void forget(const Event& done);

 private:
  std::mutex mutex_;  // guards all below
  int64_t clock_ = 0;
  std::set<std::pair<int64_t, int>> waiting_;  // numbers, proposed or given, with their sets
  Event last_;
};

}  // namespace hvd
