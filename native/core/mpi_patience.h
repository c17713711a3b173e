// Waiting for other ranks: politely, knowing for whom, and not for ever.
//
// The ranks of a set make the same sequence of steps. A rank that waits in a step for more than a
// second tells the others so, with the step's number; who has not told is missing. A rank that
// gives up tells the others why, and they give up with the same words.
#pragma once

#include <mpi.h>

#include <chrono>
#include <list>
#include <string>
#include <vector>

#include "core/transport.h"

namespace hvd {

class MpiPatience {
 public:
  // A wait for the others in the present step. Its owner looks itself for what it waits for.
  class Wait {
   public:
    Wait(MpiPatience& patience, const Waiting& waiting) : patience_(patience), waiting_(waiting) {}

    // Throws Lost if a transport of this process has given up: MPI must not be called any more.
    void check() const;

    // Checks, and lets a moment pass if nothing has come: a short one at first, then longer ones.
    // Throws Lost.
    void turn(bool something_has_come);

   private:
    MpiPatience& patience_;
    const Waiting& waiting_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    bool told_ = false;
  };

  MpiPatience(MPI_Comm communicator, const std::vector<int>& ranks);  // duplicates it
  ~MpiPatience();

  void next_step() { ++step_; }

  // Until all requests are complete. Throws Lost.
  void wait(std::vector<MPI_Request>& requests, const Waiting& waiting);

  // Hears what the others have told until now. Throws Lost if one has given up.
  void listen();

  // Ends the waits of all ranks. Throws Lost.
  [[noreturn]] void give_up(const std::string& why);

 private:
  struct Notice {
    std::string bytes;
    std::vector<MPI_Request> requests;
  };

  void tell(int tag, const std::string& bytes);
  [[noreturn]] static void lose(const std::string& why);
  std::vector<int> missing() const;

  MPI_Comm communicator_;
  const std::vector<int> ranks_;
  int rank_;
  uint64_t step_ = 0;
  std::vector<uint64_t> waits_in_;  // by rank: the last step of which it told that it waits
  std::list<Notice> sent_;
};

}  // namespace hvd
