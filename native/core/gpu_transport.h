// Tensors of GPUs, around the transport that the ranks' hosts use.
//
//   TensorFlow's stream   kernels ── ready ─────────────────────── wait done ── kernels
//                                       ╲                          ╱
//   our stream                        wait ready ── NCCL ── done ──
//
// No host waits for any of it: a request is done() when all this has been enqueued. Whoever finds
// that work does not end, or that NCCL has failed, tells all ranks, over the host's transport.
//
// What NCCL does not compute, what the user wants to go by MPI, and all if a rank has no NCCL,
// travels through memory of the host.
//
// A stream that waits for work that will never end is not let go: what comes after would use values
// that nobody has computed, and could store them. `stranded` is called instead, to end the process.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/gpu.h"
#include "core/nccl_collectives.h"
#include "core/settings.h"
#include "core/transport.h"

namespace hvd {

class GpuTransport : public Transport {
 public:
  using Stranded = std::function<void(const std::string& why)>;

  GpuTransport(std::unique_ptr<Transport> host, const Settings& settings, Stranded stranded);
  ~GpuTransport() override;

  const std::vector<int>& ranks() const override { return host_->ranks(); }
  int rank() const override { return host_->rank(); }
  const std::string& host(int rank) const override { return host_->host(rank); }
  std::string arrive(Request& request) override;
  std::vector<Ballot> agree(const Ballot& mine, const Waiting& waiting) override;
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override;
  Status run(Request& request, const Waiting& waiting) override;
  void give_up(const std::string& why) override { fail(why); }
  void listen() override { host_->listen(); }
  bool busy() override;

 private:
  // What the GPU has been given and may not have done yet.
  struct Work {
    Event done;
    std::string name;
    std::chrono::steady_clock::time_point since;
    std::vector<Memory> held;
  };

  Gpu* gpu(int device, std::string* problem);
  Status run_on_gpu(Request& request, const Waiting& waiting);
  void stand_in_on(Gpu& gpu, Request& request, std::vector<Memory>* held);
  Status introduce(Gpu& gpu, const Waiting& waiting);
  bool by_nccl(const Request& request) const;
  Pause pause_with(const Waiting& waiting);
  void hear();
  void drop_finished();
  std::string trouble();
  [[noreturn]] void fail(const std::string& why);
  void mourn(const std::string& why);

  const std::unique_ptr<Transport> host_;
  const Settings settings_;
  const Stranded stranded_;

  std::mutex mutex_;  // guards the making of the next
  std::unique_ptr<Gpu> gpu_;

  // The engine's thread alone uses these.
  bool introduced_ = false;
  Status refusal_;  // of all requests of GPUs
  std::unique_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<NcclCollectives> nccl_;
  std::deque<Work> works_;  // oldest first
  std::chrono::steady_clock::time_point progress_;
  bool lost_ = false;
};

// The device of requests of ranks that have joined and have not said where their tensors are.
void set_default_gpu(int device);

}  // namespace hvd
