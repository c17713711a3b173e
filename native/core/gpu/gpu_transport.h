// Collectives on tensors of GPUs. Wraps the transport for the memory of hosts.
//
//   TensorFlow's stream   kernels ── ready ─────────────────────── wait done ── kernels
//                                       ╲                          ╱
//   our stream                        wait ready ── NCCL ── done ──
// No host thread waits for any of it: a request is done() when all this has been enqueued. For
// gradients TensorFlow's stream waits later, once for all of them (wait_in), so that
// backpropagation goes on beside NCCL. The rank that detects stalled work or an NCCL error aborts
// all ranks through the host's transport. Requests that NCCL does not support or that the user
// wants over MPI, and all requests if a rank has no NCCL, go through the host's memory, or are
// given to MPI if it knows GPUs. A stream that waits for work that cannot finish is never released:
// later kernels would read values that were never computed. `abort_process` is called instead.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/settings.h"
#include "core/gpu/gpu.h"
#include "core/gpu/launch_order.h"
#include "core/gpu/nccl_collectives.h"
#include "core/request/transport.h"

namespace hvd {

class GpuTransport : public Transport {
 public:
  using AbortProcess = std::function<void(const std::string& why)>;

  // Process sets have the same numbers on all ranks.
  GpuTransport(std::unique_ptr<Transport> host, const Settings& settings,
               AbortProcess abort_process, int process_set = 0);
  ~GpuTransport() override;

  const std::vector<int>& ranks() const override { return host_->ranks(); }
  int rank() const override { return host_->rank(); }
  const std::string& host(int rank) const override { return host_->host(rank); }
  std::string prepare(Request& request) override;
  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override;
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override;
  std::string reduce(const std::string& mine, const Combine& combine,
                     const Waiting& waiting) override;
  Status run(Request& request, const Waiting& waiting) override;
  std::string wait_in(void* stream) override;
  void abort(const std::string& why) override { fail(why); }
  void check_aborted() override { host_->check_aborted(); }
  bool busy() override;

 private:
  // Work that was enqueued and may not be finished.
  struct Work {
    Event done;
    std::string name;
    Clock::time_point since;
    std::vector<Memory> held;
  };

  Gpu* gpu(int device, std::string* problem);
  template <typename Call>
  auto noting_aborts(const Call& call);
  Status run_on_gpu(Request& request, const Waiting& waiting);
  void neutral_request_on(Gpu& gpu, Request& request, std::vector<Memory>* held);
  Status handshake(Gpu& gpu, const Waiting& waiting);
  bool by_nccl(const Request& request) const;
  LaunchOrder::Exchange exchange_with(const Waiting& waiting);
  Pause pause_with(const Waiting& waiting);
  void check_peers();
  void drop_finished();
  std::string failure();
  bool has_lost_work() const;
  [[noreturn]] void fail(const std::string& why);
  void on_abort(const std::string& why);

  const std::unique_ptr<Transport> host_;
  const Settings settings_;
  const AbortProcess abort_process_;
  const int process_set_;

  std::mutex mutex_;  // guards the creation of gpu_, and the other two
  std::unique_ptr<Gpu> gpu_;
  Event last_done_;                             // after the last request that does not wait
  std::vector<std::shared_ptr<void>> awaited_;  // the memory of those since the last wait

  // Used by one thread at a time, as all methods but prepare().
  bool in_turns_ = false;  // whether any rank of the set has several sets; since the last agreement
  bool handshake_done_ = false;
  bool by_mpi_ = false;  // whether MPI can have the memory of GPUs
  Status refusal_;       // the error of all requests on GPUs
  std::unique_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<NcclCollectives> nccl_;
  std::deque<Work> works_;        // oldest first
  uint64_t groups_in_works_ = 0;  // of NCCL's calls, so far
  Event last_launch_;             // of NCCL's work
  Clock::time_point progress_, looked_;
  bool aborted_ = false;
};

// Says that this process may get so many more process sets: 1 before all ranks agree to add one, -1
// after it.
void expect_process_sets(int more);

// The device that a rank uses after it has joined, if it has not used one before.
void set_default_gpu(int device);

}  // namespace hvd
