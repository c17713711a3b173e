// Ranks of one host: collectives that stream through shared memory.
//
// An allreduce of more than a few KiB, in chunks; each rank owns a slice of every chunk. Chunk k:
//
//   pack    this rank's tensors, but for its own slice ──> its slot of chunk k
//   reduce  slice r of all slots, and its own ──> output tensors and, for the other ranks, slot r;
//           by rank r, in rank order, in blocks that stay in the first-level cache
//   unpack  the other ranks' slices ──> output tensors
//
// Each rank has kWindow slots. Counters say how many chunks it has brought through each stage, and
// a rank works in any stage for which the others' counters allow it, and waits only if there is
// none. The slots stay in the cache, whereas one MPI call over the whole tensor would go to memory
// several times. What goes into a slot may pass the writer's cache (send.h), so nobody reads its
// own slot. As with MPI each element is summed once, by one rank, in rank order, so all ranks
// hold the same bits, and the same as over MPI.
//
// A rank's part of the shared memory (shared_memory.h), by words:
//
//   small slot   areas 0 and 1, in turn by step: a proposal, then up to 16 KiB of tensors
//   slot         areas 2 to 5, in turn by chunk: a rank's bytes of one chunk, at most 512 KiB
//   chunk        what all ranks move at once: the same bytes of the request, from each rank's slot
//   slice        of a chunk: the bytes that one rank reduces, for all ranks
//   block        of a slice: 32 KiB that are reduced at once, and stay in the first-level cache
//   place        of the slots: up to 64 KiB that travel with a proposal, 32 places in turn by step
//
// The tensors of a small allreduce travel with the ranks' proposals, and every rank sums all of
// them into its output. Other small allreduces and the other collectives use the small slots, or
// the slots, in turn by step, with a barrier after each: what is written before a barrier stays
// until after the next one.
#pragma once

#include <memory>
#include <optional>
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
  // Small enough for the slots of all chunks under way to stay in the caches.
  static constexpr int64_t kChunkBytes = 512 << 10;

  // All ranks of `mpi` are on this host. Throws std::runtime_error on all of them if they cannot
  // share memory; then `mpi` is left to the caller.
  explicit HostTransport(std::unique_ptr<MpiTransport>* mpi);

  // For ranks that are threads, without MPI: `memory` as for SharedMemory, memory_bytes() of it.
  HostTransport(char* memory, std::unique_ptr<Transport> instead_of_mpi);
  static int64_t memory_bytes(int ranks);

  const std::vector<int>& ranks() const override { return mpi_->ranks(); }
  int rank() const override { return mpi_->rank(); }
  const std::string& host(int rank) const override { return mpi_->host(rank); }
  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override;
  Transport* mpi() override { return mpi_.get(); }
  void abort(const std::string& why) override;
  void check_aborted() override;
  void allreduce(Request& request) override;

  // In host_collectives.cc.
  void broadcast(Request& request) override;
  void reducescatter(const Request& request, size_t i) override;
  void gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) override;
  void exchange(const std::vector<Part>& sent, const std::vector<Part>& received) override;

 private:
  class Window;
  struct Head;
  enum class SlotUse { none, chunks, barriers };

  // Up to this size each rank reduces everything itself, after one barrier.
  static constexpr int64_t kSmallBytes = 16 << 10;

  char* small_slot(int rank, uint64_t step) const;
  char* slot(int rank, uint64_t chunk) const;
  char* sent_along(int rank, bool in_slots) const;
  void barrier() { memory_.barrier(waiting_); }
  void make_room(int64_t bytes) {
    KindTransport::make_room(memory_, bytes, kChunkBytes, &chunk_bytes_);
  }
  void use_slots(SlotUse use);
  void reduce_small(const Request& request, DTypeGroup& group);
  void sum_all(const Request& request, DTypeGroup& group);
  void sum_blocks(const Request& request, DType dtype, const std::vector<char*>& sources,
                  int64_t bytes, ByteCursor& in, ByteCursor& out, char* sent);
  std::optional<DTypeGroup> to_send_along(const Request& request) const;
  void propose(const Proposal& mine, std::optional<DTypeGroup> along);
  Summary read_proposals();

  template <typename Take>
  void scatter(std::vector<ByteCursor>& to, int64_t longest, const Take& take);

  SharedMemory memory_;
  int64_t chunk_bytes_;               // of each slot, committed on all ranks
  uint64_t chunks_ = 0;               // of all allreduces so far
  SlotUse slot_use_ = SlotUse::none;  // since the last agreement
  std::vector<const void*> terms_;
  std::vector<char*> sources_;       // of a small allreduce, by rank
  bool proposed_ = false;            // and has not read the others' proposals
  std::optional<DTypeGroup> along_;  // sent with the last proposal, to be summed by run()
  uint64_t proposal_step_ = 0;
  const std::unique_ptr<Transport> mpi_;
};

}  // namespace hvd
