// Plain MPI: every collective as non-blocking MPI calls on a communicator of our own.
//
// Allreduce, for N ranks, chunk by chunk (chunks fit the cache):
//
//   pack    tensors ──> chunk
//   reduce  as between hosts, each rank as a host (inter_host.h)
//   unpack  chunk ──> output tensors
//
// Each element is summed once, by one rank, in rank order: all ranks hold the same bits and a rerun
// repeats them, whatever algorithms MPI picks.
//
// The tensors of a small allreduce travel with the ranks' proposals, and every rank sums all
// of them. The steps of an agreement grow with the logarithm of the ranks' number.
//
// Nothing blocks in MPI: each wait can end with an error that names who is missing.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cpu/inter_host.h"
#include "core/cpu/kind_transport.h"
#include "core/cpu/mpi_wait.h"
#include "core/math/byte_cursor.h"

namespace hvd {

class MpiTransport : public KindTransport {
 public:
  // Up to so many ranks tell each other of themselves when they wait.
  static constexpr int kFewRanks = 64;

  // Duplicates the communicator, collectively. `ranks` are its members' ranks in the job; `few` is
  // the same on all ranks.
  MpiTransport(MPI_Comm communicator, std::vector<int> ranks, int few = kFewRanks);
  ~MpiTransport() override;

  MPI_Comm communicator() const { return communicator_; }
  MpiWaiter& waiter() { return *waiter_; }
  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  const std::string& host(int rank) const override { return hosts_[host_of_[rank]]; }
  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override;
  // The end of an agreement, once this is known of all.
  void note_agreement();

  Transport* mpi() override { return this; }
  void abort(const std::string& why) override { waiter_->abort(why); }
  void check_aborted() override { waiter_->check_aborted(); }

  void begin(const Waiting& waiting) override {
    waiter_->next_step();
    waiting_ = waiting;
  }
  void allreduce(Request& request) override;
  static bool is_brief(const Request& request);
  void broadcast(Request& request) override;
  void reducescatter(const Request& request, size_t i) override;
  void gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) override;
  void exchange(const std::vector<Part>& sent, const std::vector<Part>& received) override;
  std::vector<int64_t> exchange_numbers(const std::vector<int64_t>& mine,
                                        const Waiting& waiting) override;
  std::string reduce(const std::string& mine, const Combine& combine,
                     const Waiting& waiting) override;

 private:
  void exchange_bytes(const std::string* sent, std::string* received, int other);
  void propose(const Proposal& mine, const Request* next);

  void wait(MPI_Request request);
  void wait(InterHostExchange& exchange);

  const std::vector<int> ranks_;
  MPI_Comm communicator_;
  const int rank_;
  std::vector<std::string> hosts_;  // of each run of ranks
  std::vector<int> host_of_;        // by rank
  std::unique_ptr<MpiWaiter> waiter_;
  Clock::time_point agreed_ = Clock::now();  // when the last agreement was complete
  ProposalExchange proposals_;
  std::optional<DTypeGroup> along_;  // sent with the last proposal, to be summed by run()
  std::vector<char> chunk_;          // this rank's part of an allreduce, then its result
  std::vector<char> received_;       // what the other ranks sent of a slice, in rank order
  std::unique_ptr<InterHostExchange> exchange_;
};

}  // namespace hvd
