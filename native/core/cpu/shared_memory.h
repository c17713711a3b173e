// A block of memory that the ranks of one host share, and a barrier in it.
//
// Every rank has an arrival counter, the number of barriers that it has reached; a barrier ends
// when all counters have reached its number. A rank that waits spins for some microseconds, if each
// rank has a core, and then sleeps in the kernel (futex) until the last rank to arrive wakes it.
//
// At first only the beginning of each slot is committed, so that a process set that moves little or
// nothing takes little of /dev/shm. commit() commits the rest.
//
// The constructor unlinks the block's name, so the kernel frees the block with the last process,
// however that ends.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/request/transport.h"

namespace hvd {

// A warning, if commit() fails on any rank.
std::string no_room_text(int64_t chunk_bytes);

class SharedMemory {
 public:
  // Each rank's part: `front` bytes, committed at once, then `slots` slots of `slot_bytes`, of
  // which the first `slot_front` bytes are committed at once. All but `slots` in whole pages.
  struct Layout {
    int64_t front, slots, slot_bytes, slot_front;
  };

  // Collective. Throws std::runtime_error, on all ranks alike, if the ranks cannot share memory.
  SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks, const Layout& layout);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // A rank's part of the block: its front, and its slots. Aligned to pages.
  char* front(int rank) const;
  char* slot(int rank, uint64_t index) const;

  // Commits all of this rank's slots. False if the memory is used up; otherwise a write would kill
  // this process. The ranks must compare the results.
  bool commit();

  // Whether ranks that wait spin before they sleep.
  bool spins() const { return spin_seconds_ > 0; }

  // Waits until all ranks have reached the next step. Throws Aborted.
  void barrier(const Waiting& waiting);

  // Throws Aborted if a rank has called abort().
  void check_aborted() const;

  // Aborts the waits of all ranks. Throws Aborted.
  [[noreturn]] void abort(const std::string& why);

  // The step that this rank has reached.
  uint64_t step() const { return step_; }

 private:
  struct Header;
  struct ArrivalCounter;

  ArrivalCounter& counter(int rank) const;
  bool all_have_arrived() const;
  void sleep(const Waiting& waiting);

  bool reserve(int64_t offset, int64_t bytes);

  const std::vector<int> ranks_;
  const Layout layout_;
  int rank_;
  int64_t part_bytes_;
  int file_ = -1;
  double spin_seconds_;
  uint64_t step_ = 0;
  char* block_ = nullptr;
  int64_t block_bytes_ = 0;
  Header* header_ = nullptr;
};

}  // namespace hvd
