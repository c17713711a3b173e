// Plain MPI: every collective as point-to-point-free MPI calls on a communicator of our own.
//
// Allreduce, for N ranks, chunk by chunk (chunks fit the cache and MPI's 31-bit counts):
//
//   pack       tensors ──> chunk, cut into N slices
//   Alltoallv  slice j of every rank goes to rank j           (N-1)/N of the chunk out and in
//   reduce     rank j combines its N slices in rank order
//   Allgatherv the N results go to all                        (N-1)/N of the chunk out and in
//   unpack     chunk ──> output tensors
//
// 2(N-1)/N × bytes per rank is the least that any allreduce can move (Patarasuk and Yuan, 2009,
// https://doi.org/10.1016/j.jpdc.2008.09.002). Each element is summed once, by one rank, in rank
// order: all ranks hold the same bits and a rerun repeats them, whatever algorithms MPI picks.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "core/transport.h"

namespace hvd {

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm communicator);  // duplicates it
  ~MpiTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool agree(uint64_t value, const std::function<void(double)>& waiting) override;
  std::vector<std::string> gather(const std::string& mine) override;
  Status run(Request& request) override;

 private:
  struct Span;

  void allreduce(Request& request);
  void allreduce_spans(const Request& request, DType dtype, const std::vector<Span>& spans);
  void reduce_chunk(const Request& request, DType dtype, int64_t elements);
  Status allgather(Request& request);
  void broadcast(Request& request);
  void gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all);

  MPI_Comm communicator_;
  int rank_;
  int size_;
  std::vector<char> chunk_;     // this rank's part of an allreduce, then its result
  std::vector<char> received_;  // what the other ranks sent of it
};

}  // namespace hvd
