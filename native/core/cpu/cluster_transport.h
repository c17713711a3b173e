// Ranks of several hosts: an allreduce within each host in shared memory, and between hosts over
// MPI, in chunks of which several are in flight at once.
//
// Each host has as many leaders as the smallest host has ranks. Leader c of each host is
// responsible for slice c of every chunk. Chunk k:
//
//   pack    each rank's tensors ──> its slot
//   reduce  slice c of all the host's slots ──> slice c of leader c's, by leader c, in rank order
//   allreduce between hosts: that ──> sum over all hosts, by leaders c; see inter_host.h
//   unpack  the leaders' slices ──> output tensors
// A rank does not wait in one stage while it can work in another: one chunk is on the network while
// the next is packed and the previous one unpacked. The bytes between hosts do not grow with the
// ranks of a host. Counters in shared memory show each rank's progress.
//
// Agreements, with small sums, go the same way: through shared memory to the first rank of each
// host, between these, and back. So do broadcasts and small allgathers. Reducescatter and allgather
// work likewise, too: each rank has a partner on each other host, and each host sends its sum of a
// piece, or a piece, once. Alltoall goes over MPI, from rank to rank.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/inter_host.h"
#include "core/cpu/kind_transport.h"
#include "core/cpu/mpi_transport.h"
#include "core/cpu/shared_memory.h"
#include "core/math/byte_cursor.h"

namespace hvd {

class ClusterTransport : public KindTransport {
 public:
  // `host` has the ranks of this host, in rank order. All use the first rank's `algorithm`.
  // Collective. Throws std::runtime_error on all ranks if the ranks of any host cannot share
  // memory; then `mpi` is left to the caller.
  ClusterTransport(std::unique_ptr<MpiTransport>* mpi, MPI_Comm host, Allreduce algorithm);
  ~ClusterTransport() override;

  const std::vector<int>& ranks() const override { return mpi_->ranks(); }
  int rank() const override { return mpi_->rank(); }
  const std::string& host(int rank) const override { return mpi_->host(rank); }
  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override;
  Transport* mpi() override { return mpi_.get(); }
  void abort(const std::string& why) override { mpi_->abort(why); }
  void check_aborted() override { mpi_->check_aborted(); }

  void begin(const Waiting& waiting) override {
    waiting_ = waiting;
    mpi_->begin(waiting);
  }
  void allreduce(Request& request) override;
  void broadcast(Request& request) override;
  void exchange(const std::vector<Part>& sent, const std::vector<Part>& received) override {
    mpi_->exchange(sent, received);
  }
  std::vector<int64_t> exchange_numbers(const std::vector<int64_t>& mine,
                                        const Waiting& waiting) override {
    return mpi_->exchange_numbers(mine, waiting);
  }
  std::string reduce(const std::string& mine, const Combine& combine,
                     const Waiting& waiting) override {
    return mpi_->reduce(mine, combine, waiting);
  }

  // In cluster_collectives.cc.
  void reducescatter(const Request& request, size_t i) override;
  void gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) override;

 private:
  struct Shared;
  Shared& shared(int local_rank) const;
  void propose(const Proposal& mine, const Request* next);
  bool has_agreed(const Request* next, bool* progressed);
  void number_hosts(const MpiTransport& mpi, MPI_Comm host);
  char* slot(int local_rank, uint64_t chunk) const;
  int partner(int rank, int host) const;
  int host_of_root(const Request& request) const;  // -1: it has none
  std::vector<int> partners(int local_rank) const;
  void make_room(int64_t bytes) {
    KindTransport::make_room(*memory_, bytes, full_chunk_bytes_, &chunk_bytes_);
  }

  // Calls for each leader's slice of a chunk of so many elements: where it is, and its bytes.
  template <typename Call>
  void each_slice(uint64_t chunk, int leaders, int64_t elements, int64_t width, const Call& call) {
    for (int c = 0; c < leaders; ++c) {
      const int64_t begin = elements * c / leaders * width;
      call(c, slot(c, chunk) + begin, elements * (c + 1) / leaders * width - begin);
    }
  }

  using EachChunk = std::function<void(uint64_t)>;
  void in_chunks(int64_t count, int leaders, const EachChunk& pack, const EachChunk& start,
                 const EachChunk& unpack);
  // Of messages between `across_`, and the tag after it.
  static int tag_of(uint64_t chunk) { return static_cast<int>(2 * (chunk % kWindow)); }
  std::pair<Factors, Factors> factors_of_stages(const Request& request, DType dtype,
                                                Allreduce algorithm) const;
  void start_inter_host(const Request& request, DType dtype, int64_t elements, uint64_t chunk);
  void start_inter_host(const Slice& slice, uint64_t chunk);

  static constexpr uint64_t kWindow = 8;

  Allreduce algorithm_;
  int local_rank_ = 0, local_size_ = 0, most_local_ = 0, hosts_ = 0, leaders_ = 0;
  int host_ = 0;                           // hosts are numbered in the order of their first ranks
  std::vector<std::vector<int>> by_host_;  // their ranks
  std::vector<int> place_;                 // by rank: its number on its host
  MPI_Comm across_ = MPI_COMM_NULL;        // this leader's, one rank of each host
  int64_t chunk_bytes_ = 0;                // of each slot, committed on all ranks
  int64_t full_chunk_bytes_ = 0;           // of a slot
  uint64_t chunks_ = 0;                    // of all requests so far
  uint64_t agreements_ = 0;
  bool proposed_ = false;            // and has not read what all have
  std::optional<DTypeGroup> along_;  // sent with the last proposal, to be summed by run()
  std::unique_ptr<ProposalExchange> proposals_;  // of this host, by its first rank
  std::unique_ptr<SharedMemory> memory_;
  std::unique_ptr<MpiTransport> mpi_;
  // Outlives an aborted request, since MPI still uses its memory.
  std::deque<std::unique_ptr<InterHostExchange>> in_flight_;
};

}  // namespace hvd
