// Ranks of several hosts: an allreduce that is taken within each host in shared memory and between
// the hosts over MPI, in chunks, of which several are under way at once.
//
// As many ranks of each host as the smallest host has carry one slice of every chunk each. Chunk k:
//
//   pack    each rank's tensors ──> its slot
//   reduce  slice c of all the host's slots ──> result, by carrier c, in rank order
//   cross   result ──> sum over all hosts, by carriers c of all hosts; see crossing.h
//   unpack  all carriers' results ──> output tensors
//
// No rank waits in one of these while there is something to do in another: a chunk crosses while
// the next is packed and the one before it unpacked, and what crosses does not grow with the ranks
// of a host. Counters in the shared memory tell the host's ranks how far each has come.
//
// What is not here goes over MPI, from rank to rank.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/crossing.h"
#include "core/layout.h"
#include "core/mpi_transport.h"
#include "core/shared_memory.h"

namespace hvd {

class ClusterTransport : public Transport {
 public:
  // `host` has the ranks of this host, in the order of their ranks. The first rank's `way` is that
  // of all. Collective; throws std::runtime_error, on all ranks, if those of any host cannot share
  // memory; only otherwise takes `mpi`.
  ClusterTransport(std::unique_ptr<MpiTransport>* mpi, MPI_Comm host, Allreduce way);
  ~ClusterTransport() override;

  const std::vector<int>& ranks() const override { return mpi_->ranks(); }
  int rank() const override { return mpi_->rank(); }
  const std::string& host(int rank) const override { return mpi_->host(rank); }
  std::vector<Ballot> agree(const Ballot& mine, const Waiting& waiting) override {
    return mpi_->agree(mine, waiting);
  }
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override {
    return mpi_->gather(mine, waiting);
  }
  Status run(Request& request, const Waiting& waiting) override;
  void give_up(const std::string& why) override { mpi_->give_up(why); }
  void listen() override { mpi_->listen(); }

 private:
  struct Progress;

  Progress& progress(int local_rank) const;
  char* slot(int local_rank, uint64_t chunk) const;
  char* result(int carrier, uint64_t chunk) const;
  uint64_t least(std::atomic<uint64_t> Progress::* counter, int ranks) const;
  void make_room(int64_t bytes, const Waiting& waiting);
  void allreduce(const Request& request, OfOneDType& group, const Waiting& waiting);
  std::pair<Factors, Factors> factors_of_stages(const Request& request, DType dtype) const;
  void start_crossing(const Request& request, DType dtype, int64_t elements, uint64_t chunk);

  Allreduce way_;
  int local_rank_ = 0, local_size_ = 0, most_local_ = 0, hosts_ = 0, carriers_ = 0;
  MPI_Comm across_ = MPI_COMM_NULL;  // this carrier's, one rank of each host
  int64_t chunk_bytes_ = 0;          // of each slot, committed on all ranks
  int64_t full_chunk_bytes_ = 0;     // of a slot
  bool asked_for_room_ = false;
  uint64_t chunks_ = 0;  // of all requests so far
  std::unique_ptr<SharedMemory> memory_;
  std::unique_ptr<MpiTransport> mpi_;
  // Outlives a request that is given up, for MPI still uses its memory.
  std::deque<std::unique_ptr<Crossing>> crossings_;
};

}  // namespace hvd
