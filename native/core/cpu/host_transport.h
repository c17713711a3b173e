// Ranks of one host: collectives that stream through shared memory.
//
// Each rank has two slots, used in turn. Allreduce, for N ranks, chunk k:
//
//   pack    this rank's tensors, but for its own slice ──> its slot of chunk k
//   barrier
//   reduce  slice r of all slots, and its own ──> result k, by rank r, in rank order; then at once:
//   pack    chunk k + 1 into the other slots
//   barrier
//   unpack  result k ──> output tensors
// One barrier per chunk. The slots stay in the cache, whereas one MPI call over the whole tensor
// would go to memory several times. As with MPI each element is summed once, by one rank, in rank
// order, so all ranks hold the same bits, and the same as over MPI.
// The other collectives pack what they send, wait at the barrier, and unpack what they receive; for
// alltoall, reducescatter and Adasum a slot has a part for each rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/cpu/kind_transport.h"
#include "core/cpu/mpi_transport.h"
#include "core/cpu/shared_memory.h"
#include "core/math/byte_cursor.h"
#include "core/math/layout.h"

namespace hvd {

class HostTransport : public KindTransport {
 public:
  // All ranks of `mpi` are on this host. Throws std::runtime_error on all of them if they cannot
  // share memory; then `mpi` is left to the caller.
  explicit HostTransport(std::unique_ptr<MpiTransport>* mpi);

  const std::vector<int>& ranks() const override { return mpi_->ranks(); }
  int rank() const override { return mpi_->rank(); }
  const std::string& host(int rank) const override { return mpi_->host(rank); }
  std::vector<Proposal> agree(const Proposal& mine, const Waiting& waiting) override;
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override;
  Status run(Request& request, const Waiting& waiting) override;
  void abort(const std::string& why) override;
  void check_aborted() override;

 private:
  char* slot(int rank, uint64_t step) const;
  char* result(int rank, uint64_t step) const;
  void barrier() { memory_.barrier(waiting_); }
  void make_room(int64_t bytes);
  Status allreduce(Request& request) override;
  void reduce(const Request& request, DType dtype, ByteCursor& in, ByteCursor& out);

  // In host_collectives.cc.
  Status missing(Request& request) override { return mpi_->run(request, waiting_); }
  Status adasum(Request& request) override;
  Status reducescatter(Request& request) override;
  Status allgather(Request& request) override;
  Status alltoall(Request& request) override;
  Status broadcast(Request& request) override;
  template <typename Take>
  void scatter(std::vector<ByteCursor>& to, int64_t longest, const Take& take);
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
