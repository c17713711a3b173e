// Ranks of one host: collectives that stream through shared memory.
//
// Each rank has two slots, used in turn. Allreduce, for N ranks, chunk k:
//
//   pack    this rank's tensors, but for its own slice ──> its slot of chunk k
//   meet
//   reduce  slice r of all slots, and its own ──> result k, by rank r, in rank order; then at once:
//   pack    chunk k + 1 into the other slots
//   meet
//   unpack  result k ──> output tensors
//
// One meeting per chunk. The slots stay in the cache, where one call of MPI over the whole tensor
// goes to memory several times. As with MPI each element is summed once, by one rank, in rank
// order, so all ranks hold the same bits, and the same as over MPI.
//
// The others likewise pack what they give, meet, and take what they want; for alltoall,
// reducescatter and Adasum a slot has a part for each rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/kind_transport.h"
#include "core/layout.h"
#include "core/mpi_transport.h"
#include "core/shared_memory.h"

namespace hvd {

class HostTransport : public KindTransport {
 public:
  // All ranks of `mpi` are on this host. Throws std::runtime_error, on all of them, if they cannot
  // share memory; only otherwise takes `mpi`.
  explicit HostTransport(std::unique_ptr<MpiTransport>* mpi);

  const std::vector<int>& ranks() const override { return mpi_->ranks(); }
  int rank() const override { return mpi_->rank(); }
  const std::string& host(int rank) const override { return mpi_->host(rank); }
  std::vector<Ballot> agree(const Ballot& mine, const Waiting& waiting) override;
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override;
  void give_up(const std::string& why) override;
  void listen() override;

 private:
  char* slot(int rank, uint64_t step) const;
  char* result(int rank, uint64_t step) const;
  void meet() { memory_.meet(waiting_); }
  void make_room(int64_t bytes);
  void allreduce(Request& request) override;
  void reduce_stream(const Request& request, DType dtype, Stream& in, Stream& out);
  void adasum(Request& request) override;
  Status reducescatter(Request& request) override;
  Status allgather(Request& request) override;
  Status alltoall(Request& request) override;
  void broadcast(Request& request) override;
  template <typename Take>
  void scatter(std::vector<Stream>& to, int64_t longest, const Take& take);
  void exchange(const std::vector<Part>& sent, const std::vector<Part>& received);
  void share(const void* mine, const std::vector<int64_t>& sizes,
             const std::vector<char*>& targets);
  template <typename Number>
  std::vector<Number> share_numbers(const std::vector<Number>& mine);
  Status agree_on(const Status& mine, const Request& request);

  SharedMemory memory_;
  int64_t chunk_bytes_;  // of each slot, committed on all ranks
  bool asked_for_room_ = false;
  const std::unique_ptr<MpiTransport> mpi_;
};

}  // namespace hvd
