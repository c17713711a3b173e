// A block of memory that the ranks of one host share, with counters and a barrier in it.
//
//   block = counters | part of rank 0 | part of rank 1 | ...
//   part  = what one rank writes and all ranks read: area 0 | area 1 | ...
//   area  = bytes for one purpose, which the transport chooses (host_transport.h)
//
// At first only the beginning of each area is committed, so that a process set that moves little or
// nothing takes little of /dev/shm. commit() commits the rest.
//
// The constructor unlinks the block's name, so the kernel frees the block with the last process,
// however that ends.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/cpu/host_counters.h"
#include "core/request/transport.h"

namespace hvd {

class SharedMemory {
 public:
  // `front`: the bytes that are committed at once. Both in whole pages.
  struct Area {
    int64_t bytes, front;
  };

  // Collective. Each rank's part of the block has these areas. Throws std::runtime_error, on all
  // ranks alike, if the ranks cannot share memory.
  SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks, std::vector<Area> areas);

  // For ranks that are threads, without MPI: in a block of bytes() zeros, aligned to pages, which
  // outlives all ranks.
  SharedMemory(char* block, int rank, const std::vector<int>& ranks, std::vector<Area> areas)
      : areas_(std::move(areas)),
        size_(static_cast<int>(ranks.size())),
        rank_(rank),
        front_bytes_(front_bytes(size_)),
        part_bytes_(part_bytes(areas_)),
        block_(block),
        block_bytes_(bytes(size_, areas_)) {
    if (block_) counters_ = std::make_unique<HostCounters>(block_, rank_, ranks, size_);
  }
  static int64_t bytes(int ranks, const std::vector<Area>& areas) {
    return front_bytes(ranks) + part_bytes(areas) * ranks;
  }

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // An area of a rank's part, aligned to pages.
  char* area(int rank, size_t index) const;

  // Commits all of this rank's areas. False if the memory is used up; otherwise a write would kill
  // this process. The ranks must compare the results.
  bool commit();

  HostCounters& counters() const { return *counters_; }

  // Waits until all ranks have reached the next step. Throws Aborted.
  void barrier(const Waiting& waiting) {
    arrive();
    counters_->wait(all_here(), waiting);
  }

  // The parts of a barrier: says that this rank has arrived; what to wait for then.
  void arrive() { counters_->advance(HostCounters::arrived, ++step_); }
  HostCounters::Targets all_here() const {
    HostCounters::Targets targets = HostCounters::kNone;
    targets[HostCounters::arrived] = step_;
    return targets;
  }

  // The step that this rank has reached.
  uint64_t step() const { return step_; }

 private:
  static int64_t front_bytes(int ranks) {
    constexpr int64_t kPage = 4096;
    return (HostCounters::bytes(ranks) + kPage - 1) / kPage * kPage;
  }
  static int64_t part_bytes(const std::vector<Area>& areas) {
    int64_t sum = 0;
    for (const Area& area : areas) sum += area.bytes;
    return sum;
  }
  bool reserve(int64_t offset, int64_t bytes);
  bool reserve_areas(int64_t Area::* bytes);

  const std::vector<Area> areas_;
  const int size_;
  int rank_;
  int64_t front_bytes_, part_bytes_;
  int file_ = -1;
  uint64_t step_ = 0;
  char* block_ = nullptr;
  int64_t block_bytes_ = 0;
  std::unique_ptr<HostCounters> counters_;
};

}  // namespace hvd
