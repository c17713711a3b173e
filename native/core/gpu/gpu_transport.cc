#include "core/gpu/gpu_transport.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/gpu/gpu_handshake.h"
#include "core/gpu/gpu_staging.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// How long the host polls the GPU without sleeping, and how long it sleeps between polls after
// that.
constexpr double kSpinSeconds = 100e-6;
constexpr auto kSleep = std::chrono::microseconds(50);

// How often to look for finished work between requests that follow each other.
constexpr double kLookSeconds = 1e-3;

// How long started work may take to end after an abort.
constexpr double kLastSeconds = 1.0;

std::atomic<int> default_gpu{0};
std::atomic<int> sets{0};  // made or expected

}  // namespace

void set_default_gpu(int device) { default_gpu = device; }

void expect_process_sets(int more) { sets += more; }

GpuTransport::GpuTransport(std::unique_ptr<Transport> host, const Settings& settings,
                           AbortProcess abort_process, int process_set)
    : host_(std::move(host)),
      settings_(settings),
      abort_process_(std::move(abort_process)),
      process_set_(process_set) {
  ++sets;
}

// All ranks have left the set together, or the transport was aborted.
GpuTransport::~GpuTransport() {
  --sets;
  if (!gpu_) return;
  const auto start = Clock::now();
  const Pause pause = [] { std::this_thread::sleep_for(kSleep); };
  try {
    const OnDevice here(gpu_->cuda(), gpu_->device());
    std::string why;
    while (!aborted_ && (why = failure()).empty() && !works_.empty()) pause();
    if (!aborted_ && !why.empty()) on_abort(why);
    while (!works_.empty() && seconds_since(start) < kLastSeconds) {
      pause();
      drop_finished();
    }
    if (!aborted_ && communicator_) communicator_->close();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("the GPU was not cleaned up: ") + error.what());
  }
  if (works_.empty() && !has_lost_work()) {
    LaunchOrder::of(gpu_->device()).forget(last_launch_);
    return;
  }
  // The GPU still uses it all, and to abort the communicator would release the stream.
  new std::deque<Work>(std::move(works_));
  new auto(std::move(awaited_));
  communicator_.release();
  gpu_.release();
}

// On the thread that submits.
std::string GpuTransport::prepare(Request& request) {
  if (request.device < 0) return "";
  std::string problem;
  Gpu* const gpu = this->gpu(request.device, &problem);
  if (!gpu) return problem;
  try {
    request.ready = gpu->record(static_cast<CudaStream>(request.stream));
  } catch (const GpuError& error) {
    return error.what();
  }
  return "";
}

// Made at the first request. A process set uses one device of each process.
Gpu* GpuTransport::gpu(int device, std::string* problem) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (gpu_) {
    if (gpu_->device() == device) return gpu_.get();
    *problem = "got a tensor on GPU " + std::to_string(device) + ", after others on GPU " +
               std::to_string(gpu_->device()) +
               ". A process uses one GPU; start a process for each: hvdrun -np 2.";
    return nullptr;
  }
  const CudaApi* cuda = cuda_api(settings_, problem);
  if (!cuda) return nullptr;
  try {
    gpu_ = std::make_unique<Gpu>(*cuda, device);
  } catch (const GpuError& error) {
    *problem = error.what();
  }
  return gpu_.get();
}

template <typename Call>
auto GpuTransport::noting_aborts(const Call& call) {
  try {
    return call();
  } catch (const Aborted& aborted) {
    on_abort(aborted.what());
    throw;
  }
}

// Tensors of GPUs do not travel with proposals; those of the host may. Who submits those again and
// again at once must still hear that a GPU has failed: the call with `waiting` says so.
std::optional<Summary> GpuTransport::agree(const Proposal& mine, const Request* next,
                                           const Waiting& waiting) {
  if (next && next->device != kOnHost) next = nullptr;
  if (!waiting && !next) return {};
  std::string why;
  if (seconds_since(looked_) > kLookSeconds) why = failure();
  if (!waiting && !why.empty()) return {};
  if (!why.empty()) fail(why);
  Proposal marked = mine;
  if (sets > 1) marked.flags |= Proposal::several_sets;
  Waiting watching;
  if (waiting) {
    watching = [&](double seconds, const Missing& missing) {
      const std::string failed = failure();
      return failed.empty() ? waiting(seconds, missing) : failed;
    };
  }
  return noting_aborts([&] {
    std::optional<Summary> agreement = host_->agree(marked, next, watching);
    if (agreement) in_turns_ = agreement->flags & Proposal::several_sets;
    return agreement;
  });
}

std::vector<std::string> GpuTransport::gather(const std::string& mine, const Waiting& waiting) {
  return noting_aborts([&] { return host_->gather(mine, waiting); });
}

std::string GpuTransport::reduce(const std::string& mine, const Combine& combine,
                                 const Waiting& waiting) {
  return noting_aborts([&] { return host_->reduce(mine, combine, waiting); });
}

Status GpuTransport::run(Request& request, const Waiting& waiting) {
  return noting_aborts([&] {
    try {
      return request.device == kOnHost ? host_->run(request, waiting)
                                       : run_on_gpu(request, waiting);
    } catch (const GpuError& error) {
      fail(identity(request) + " failed on rank " + std::to_string(ranks()[rank()]) + ": " +
           error.what());
    }
  });
}

std::string GpuTransport::wait_in(void* stream) {
  std::vector<std::shared_ptr<void>> memory;  // freed at the end: what uses it next waits, too
  std::lock_guard<std::mutex> lock(mutex_);
  memory.swap(awaited_);
  if (!last_done_) return "";
  try {
    gpu_->wait(static_cast<CudaStream>(stream), last_done_);
  } catch (const GpuError& error) {
    return error.what();
  }
  return "";
}

bool GpuTransport::busy() {
  if (works_.empty()) return false;
  if (const std::string why = failure(); !why.empty()) fail(why);
  check_peers();
  return !works_.empty();
}

// A rank may abort after it has agreed on a request, and then never enqueue its work.
void GpuTransport::check_peers() {
  noting_aborts([this] { host_->check_aborted(); });
}

Status GpuTransport::run_on_gpu(Request& request, const Waiting& waiting) {
  const bool joined = request.device == kOnSomeDevice;
  std::string problem;
  Gpu* const gpu = this->gpu(joined && !gpu_ ? default_gpu.load()
                             : joined        ? gpu_->device()
                                             : request.device,
                             &problem);
  if (!gpu) throw GpuError(problem);
  const OnDevice here(gpu->cuda(), gpu->device());
  if (!handshake_done_) refusal_ = handshake(*gpu, waiting);
  handshake_done_ = true;
  if (!refusal_.ok()) {
    return Status::error(refusal_.code, identity(request) + ": " + refusal_.message);
  }
  check_peers();
  const Pause pause = pause_with(waiting);
  const bool nccl = by_nccl(request);
  Transport* const mpi = by_mpi_ && can_run_over_mpi(request.kind) ? host_->mpi() : nullptr;
  if (joined && !nccl) {
    request.device = kOnHost;  // where its buffers are
    if (mpi) return mpi->run(request, waiting);
    Status status;
    for (Request& part : parts_of(request))
      if (status.ok()) status = host_->run(part, waiting);
    return status;
  }
  std::optional<LaunchOrder::Turn> turn;
  LaunchOrder& order = LaunchOrder::of(gpu->device());
  if (nccl && in_turns_) turn.emplace(order, process_set_, exchange_with(waiting), pause);
  std::vector<Memory> held;
  const auto framework = static_cast<CudaStream>(request.stream);
  if (joined) {
    neutral_request_on(*gpu, request, &held);
  } else {
    gpu->wait(gpu->stream(), std::static_pointer_cast<CUevent_st>(request.ready));
  }
  // Memory that the framework allocates now may still be in use by earlier work of its stream.
  const auto allocated = [&] {
    if (!joined) gpu->wait(gpu->stream(), gpu->record(framework));
  };
  Status status;
  if (nccl) {
    if (turn && order.last()) gpu->wait(gpu->stream(), order.last());
    status = nccl_->run(request, waiting, pause, allocated);
  } else if (mpi) {
    status = run_over_mpi(*gpu, *mpi, request, waiting, pause, framework);
  } else {
    status = run_on_host(*gpu, *host_, request, waiting, pause, allocated, &held);
  }
  // Even after a failure, enqueued work may still read the inputs.
  const Event done = gpu->record(gpu->stream());
  if (nccl) order.set_last(last_launch_ = done);
  if (!joined && request.waits) gpu->wait(framework, done);
  if (!joined && !request.waits) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_done_ = done;
    awaited_.push_back(std::move(request.memory));
  }
  works_.push_back({done, identity(request), Clock::now(), std::move(held)});
  if (nccl) groups_in_works_ = communicator_->groups();
  return status;
}

// For a rank that has joined: copies its neutral values to the GPU; its results are discarded.
void GpuTransport::neutral_request_on(Gpu& gpu, Request& request, std::vector<Memory>* held) {
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    Input& input = request.inputs[i];
    const Memory memory = gpu.allocate(input.bytes()), locked = gpu.pinned(input.bytes());
    held->insert(held->end(), {memory, locked});
    if (input.bytes() > 0) std::memcpy(locked.get(), input.data, input.bytes());
    gpu.copy(memory.get(), locked.get(), input.bytes());
    input.data = memory.get();
    if (collective(request.kind).keeps_shape) request.outputs[i] = memory.get();
  }
  request.allocate = [&gpu, held, inputs = request.inputs](size_t index, const Shape& shape,
                                                           void** data) {
    const size_t bytes = elements(shape) * size_of(inputs[index].dtype);
    held->push_back(gpu.allocate(bytes));
    *data = held->back().get();
    return Status();
  };
}

bool GpuTransport::by_nccl(const Request& request) const {
  return nccl_ && backend_of(settings_, request.kind) == GpuBackend::nccl &&
         NcclCollectives::can(request, size());
}

// Once per process set: compares the ranks' GPUs, NCCL versions and settings.
Status GpuTransport::handshake(Gpu& gpu, const Waiting& waiting) {
  std::string no_nccl;
  const NcclApi* nccl = nccl_api(settings_, &no_nccl);
  GpuInfo mine;
  mine.backends = backends_text(settings_);
  mine.machine = this_machine();
  mine.bus_id = gpu.bus_id();
  mine.problem = no_nccl;
  mine.mpi_knows_gpus = mpi_knows_gpus();
  if (nccl && wants_nccl(mine.backends)) {
    mine.nccl_version = nccl->version;
    mine.shares = settings_.ranks_share_gpus && nccl->version >= 23000;
    NcclId id;
    if (rank() == 0 && nccl->get_unique_id(&id) == kNcclSuccess) {
      mine.id.assign(id.bytes, sizeof id.bytes);
    } else if (rank() == 0) {
      mine.problem = std::string("NCCL finds no network: ") + nccl->last_error(nullptr) +
                     ". Set NCCL_DEBUG=INFO for details.";
    }
  }
  std::vector<GpuInfo> all;
  for (const std::string& bytes : host_->gather(encode(mine), waiting))
    all.push_back(decode<GpuInfo>(bytes));
  const GpuHandshake result = negotiate(all, ranks());
  if (!result.refusal.empty()) return Status::error(Code::failed_precondition, result.refusal);
  if (!result.warning.empty() && rank() == 0) log(LogLevel::warning, result.warning);
  by_mpi_ = result.by_mpi;
  if (!result.nccl) return {};
  NcclId id;
  std::copy(all[0].id.begin(), all[0].id.end(), id.bytes);
  std::optional<LaunchOrder::Turn> turn;  // the creation, too, waits for all ranks
  if (in_turns_) {
    turn.emplace(LaunchOrder::of(gpu.device()), process_set_, exchange_with(waiting),
                 pause_with(waiting));
  }
  communicator_ = std::make_unique<NcclCommunicator>(*nccl, gpu.cuda(), gpu.device(), id, rank(),
                                                     size(), pause_with(waiting));
  nccl_ = std::make_unique<NcclCollectives>(*communicator_, *host_, gpu.stream());
  return {};
}

LaunchOrder::Exchange GpuTransport::exchange_with(const Waiting& waiting) {
  return [this, waiting](int64_t mine) { return host_->gather_numbers({mine}, waiting); };
}

// Called between two polls of a GPU or of NCCL.
Pause GpuTransport::pause_with(const Waiting& waiting) {
  return [waiting, this, start = Clock::now()] {
    const double waited = seconds_since(start);
    if (waited < kSpinSeconds) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(kSleep);
    check_peers();
    const std::string why = waiting(waited, [] { return std::vector<int>(); });
    if (!why.empty()) fail(why);
  };
}

void GpuTransport::drop_finished() {
  while (!works_.empty() && gpu_->finished(works_.front().done)) {
    works_.pop_front();
    progress_ = Clock::now();
  }
}

// Drops finished work. Returns why the rest cannot finish, or "".
std::string GpuTransport::failure() {
  try {
    drop_finished();
  } catch (const GpuError& error) {
    return error.what();
  }
  looked_ = Clock::now();
  if (works_.empty()) return "";
  const std::string here = works_.front().name + " on the GPU of rank " +
                           std::to_string(ranks()[rank()]) + " (on " + host(rank()) + ")";
  if (communicator_) {
    const std::string why = communicator_->problem();
    if (!why.empty()) return here + " failed: " + why;
  }
  const double waited = seconds_since(std::max(progress_, works_.front().since));
  if (settings_.timeout_seconds == 0 || waited < settings_.timeout_seconds) return "";
  return "no progress for " + std::to_string(static_cast<int64_t>(waited)) + " s: " + here +
         " does not finish. Has the process or the GPU of another rank stopped, or the network "
         "between them? Set NCCL_DEBUG=INFO for details.";
}

// A part of a request may have been enqueued that failed then; nothing tells when that is finished.
bool GpuTransport::has_lost_work() const {
  return communicator_ && communicator_->groups() != groups_in_works_;
}

// Aborts all ranks. Throws Aborted with the reason of the rank that was first, which may be
// another.
void GpuTransport::fail(const std::string& why) {
  std::string reason = why;
  try {
    host_->abort(why);
  } catch (const Aborted& aborted) {
    reason = aborted.what();
  }
  on_abort(reason);
  throw Aborted(reason);
}

// After an abort: unfinished work never finishes, since another rank's part is missing.
void GpuTransport::on_abort(const std::string& why) {
  if (std::exchange(aborted_, true)) return;
  try {
    drop_finished();
  } catch (const GpuError&) {  // then unfinished work has no results either
  }
  if (!works_.empty() || has_lost_work()) abort_process_(why);
}

}  // namespace hvd
