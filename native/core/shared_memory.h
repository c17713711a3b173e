// A block of memory that the ranks of one host share, and how they meet in it.
//
// Every rank counts its steps: to arrive at a step is to store its number, to meet is to wait until
// all have stored it. A rank that waits spins for some microseconds, if there is a core for each
// rank, and then sleeps in the kernel (futex) until the last to arrive wakes all.
//
// The block has no name by the time that the constructor returns: it is gone with the last process,
// however that ends.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/transport.h"

namespace hvd {

class SharedMemory {
 public:
  // Collective; `bytes` for each rank. Throws std::runtime_error, on all ranks alike, if the ranks
  // cannot share memory.
  SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks, int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // A rank's part of the block, of `bytes`, aligned to pages.
  char* part(int rank) const;

  // Comes to the next step and waits until all have. Throws Lost.
  void meet(const Waiting& waiting);

  // Throws Lost if a rank has given up.
  void listen() const;

  // Ends the waits of all ranks. Throws Lost.
  [[noreturn]] void give_up(const std::string& why);

  // Of the step that this rank came to last.
  uint64_t step() const { return step_; }

 private:
  struct Header;
  struct Seat;

  Seat& seat(int rank) const;
  bool all_are_here() const;
  void sleep(const Waiting& waiting);

  const std::vector<int> ranks_;
  int rank_;
  int64_t part_bytes_;
  double spin_seconds_;
  uint64_t step_ = 0;
  char* block_ = nullptr;
  int64_t block_bytes_ = 0;
  Header* header_ = nullptr;
};

}  // namespace hvd
