#include "core/world.h"

#include <pthread.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/threads.h"
#include "core/base/watchdog.h"
#include "core/cpu/cluster_transport.h"
#include "core/cpu/host_transport.h"
#include "core/cpu/mpi_transport.h"
#include "core/cpu/mpi_wait.h"
#include "core/gpu/cuda_api.h"
#include "core/gpu/gpu_transport.h"
#include "core/kernel_api.h"
#include "core/process_sets.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// How long a script whose GPU cannot finish may go on before it is aborted, so that it can print
// its own error.
constexpr double kStrandedSeconds = 2.0;

const char* name_of_thread_level(int level) {
  return level == MPI_THREAD_SINGLE     ? "MPI_THREAD_SINGLE"
         : level == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED"
                                        : "MPI_THREAD_SERIALIZED";
}

// A communicator of these ranks; collective among them only. Calls with different tags do not
// match.
MPI_Comm communicator_of(MPI_Comm of, const std::vector<int>& ranks, int tag) {
  MPI_Group all, some;
  HVD_MPI(MPI_Comm_group(of, &all));
  HVD_MPI(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some));
  MPI_Comm members;
  constexpr int kTags = 32768;  // which every MPI has
  HVD_MPI(MPI_Comm_create_group(of, some, tag % kTags, &members));
  HVD_MPI(MPI_Group_free(&some));
  HVD_MPI(MPI_Group_free(&all));
  return members;
}

// The fastest transport between these ranks of the job; collective.
std::unique_ptr<Transport> transport_between(MPI_Comm communicator, const std::vector<int>& ranks,
                                             Allreduce algorithm) {
  auto mpi = std::make_unique<MpiTransport>(communicator, ranks);
  if (mpi->size() == 1) return mpi;
  MPI_Comm host;
  HVD_MPI(
      MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, mpi->rank(), MPI_INFO_NULL, &host));
  int neighbours = ranks_in(host), most;
  HVD_MPI(MPI_Allreduce(&neighbours, &most, 1, MPI_INT, MPI_MAX, communicator));
  std::unique_ptr<Transport> fastest;
  try {
    if (most == mpi->size()) {
      fastest = std::make_unique<HostTransport>(&mpi);
    } else {
      fastest = std::make_unique<ClusterTransport>(&mpi, host, algorithm);
    }
  } catch (const std::runtime_error& error) {
    log(LogLevel::warning, std::string("the ranks of this host cannot share memory (") +
                               error.what() +
                               "), so all goes over MPI, which is slower. Is "
                               "/dev/shm full? Containers need --shm-size or --ipc=host.");
    fastest = std::move(mpi);
  }
  HVD_MPI(MPI_Comm_free(&host));
  return fastest;
}

// This process's stream waits for work that cannot finish, and its script may wait for the stream.
void abort_soon(const std::string& why) {
  new_thread("hvd abort", [why] {
    std::this_thread::sleep_for(Seconds(kStrandedSeconds));
    log(LogLevel::error,
        "the GPU waits for work that cannot finish, so the job is aborted: " + why);
    MPI_Abort(MPI_COMM_WORLD, kWaitedInVain);
  }).detach();
}

// Wraps the transport in one for GPUs if any rank has CUDA; collective. Then all ranks do so: a
// rank that has joined takes part in what the others do with their GPUs.
std::unique_ptr<Transport> with_gpus(MPI_Comm communicator, std::unique_ptr<Transport> host,
                                     const Settings& settings, int process_set) {
  std::string why_no_gpu;
  int found = cuda_api(settings, &why_no_gpu) != nullptr;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &found, 1, MPI_INT, MPI_MAX, communicator));
  if (found)
    return std::make_unique<GpuTransport>(std::move(host), settings, abort_soon, process_set);
  host->set_why_no_gpu(why_no_gpu);
  return host;
}

}  // namespace

World& World::instance() {
  static World* world = new World();  // never destroyed, as process_sets() is not
  return *world;
}

Status World::start_mpi() {
  int finalized = 0, begun = 0, level = MPI_THREAD_SINGLE;
  HVD_MPI(MPI_Finalized(&finalized));
  if (finalized) {
    return Status::error(
        Code::failed_precondition,
        "MPI has been finalised in this process and cannot begin again. Call hvd.init() before "
        "MPI.Finalize().");
  }
  HVD_MPI(MPI_Initialized(&begun));
  if (begun) {
    HVD_MPI(MPI_Query_thread(&level));
  } else {
    HVD_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level));
    initialized_mpi_ = true;
  }
  if (level < MPI_THREAD_MULTIPLE) {
    return Status::error(
        Code::failed_precondition,
        std::string("MPI gives ") + name_of_thread_level(level) +
            ", but MPI_THREAD_MULTIPLE is needed, since collectives run beside the script. " +
            (begun ? "Call hvd.init() before MPI is initialised elsewhere, or ask for it there."
                   : "Use an MPI that was built with it."));
  }
  return {};
}

Status World::choose_job(const std::vector<int>& ranks, const MPI_Comm* communicator) {
  if (communicator) {
    HVD_MPI(MPI_Comm_dup(*communicator, &job_));
    return {};
  }
  if (ranks.empty()) {
    HVD_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &job_));
    return {};
  }
  const int rank = rank_in(MPI_COMM_WORLD), size = ranks_in(MPI_COMM_WORLD);
  for (int wanted : ranks) {
    if (wanted < 0 || wanted >= size) {
      return Status::error(Code::invalid_argument,
                           "rank " + std::to_string(wanted) + " of comm does not exist. MPI has " +
                               "ranks 0 to " + std::to_string(size - 1) + ".");
    }
  }
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
    return Status::error(Code::invalid_argument,
                         "this process is MPI's rank " + std::to_string(rank) +
                             ", which comm does not list, so it is not in the job. Catch this "
                             "error if that is intended, or give this process its own list.");
  }
  job_ = communicator_of(MPI_COMM_WORLD, ranks, ranks[0]);
  return {};
}

Status World::init(const std::vector<int>& ranks, const MPI_Comm* communicator) {
  if (initialized()) return {};
  if (Status status = read_settings(&settings_); !status.ok()) return status;
  const Watchdog watchdog(settings_, settings_.timeout(true),
                          "hvd.init() waits for another rank, which has not called it, or which "
                          "MPI cannot reach (HVD_FIRST_TIMEOUT_SECONDS).");
  if (Status status = start_mpi(); !status.ok()) return status;
  if (Status status = choose_job(ranks, communicator); !status.ok()) return status;
  // Whatever handler the script or mpi4py has chosen: that of HVD_MPI says more.
  HVD_MPI(MPI_Comm_set_errhandler(job_, MPI_ERRORS_RETURN));
  const int rank = rank_in(job_), size = ranks_in(job_);
  MPI_Comm local, cross;
  HVD_MPI(MPI_Comm_split_type(job_, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local));
  HVD_MPI(MPI_Comm_split(job_, rank_in(local), rank, &cross));
  rank_info_ = {rank, size, rank_in(local), ranks_in(local), rank_in(cross), ranks_in(cross), 0};
  HVD_MPI(MPI_Comm_free(&local));
  HVD_MPI(MPI_Comm_free(&cross));
  const int traces = settings_.traces;
  int bounds[6] = {
      rank_info_.local_size, -rank_info_.local_size, HVD_BUILD, -HVD_BUILD, traces, -traces};
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, bounds, 6, MPI_INT, MPI_MAX, job_));
  rank_info_.homogeneous = bounds[0] == -bounds[1];
  if (bounds[2] != -bounds[3]) {
    HVD_MPI(MPI_Comm_free(&job_));
    return Status::error(Code::failed_precondition,
                         "the ranks have different builds of hvd_keras, which do not understand "
                         "each other. Install the same one for all ranks, on all hosts.");
  }

  if (bounds[4] != -bounds[5]) {
    HVD_MPI(MPI_Comm_free(&job_));
    return Status::error(
        Code::invalid_argument,
        "only some ranks have HVD_TIMELINE. Set it on all (with Open MPI's mpirun: "
        "-x HVD_TIMELINE) or none.");
  }

  recorder_ = std::make_shared<Recorder>(rank, size);
  before_mpi_aborts([recorder = recorder_](const std::string& why) {
    recorder->flight().failed(why);
    recorder->flight().alarm();
  });
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  process_sets().add(0, {rank, size, new_engine(job_, all, 0)});
  initialized_ = true;
  static const int watches_forks = pthread_atfork(nullptr, nullptr, [] {
    if (instance().initialized()) process_sets().note_fork();
  });
  (void)watches_forks;
  return {};
}

std::shared_ptr<Engine> World::new_engine(MPI_Comm members, const std::vector<int>& ranks, int id) {
  auto host = transport_between(members, ranks, settings_.allreduce);
  return std::make_shared<Engine>(with_gpus(members, std::move(host), settings_, id), settings_,
                                  recorder_, id);
}

Status World::add_process_set(int id, const std::vector<int>& ranks) {
  if (const std::string why = recorder_->why_aborted(); !why.empty())
    return Status::error(Code::aborted, "no process set can be added to an aborted job: " + why);
  const Watchdog watchdog(settings_, settings_.timeout_seconds,
                          "hvd.add_process_set() waits for another rank, which does not go on.");
  ProcessSet set;
  set.size = static_cast<int>(ranks.size());
  const auto own = std::find(ranks.begin(), ranks.end(), rank_info_.rank);
  if (own != ranks.end()) {
    set.rank = static_cast<int>(own - ranks.begin());
    MPI_Comm members = communicator_of(job_, ranks, id);
    set.engine = new_engine(members, ranks, id);
    HVD_MPI(MPI_Comm_free(&members));
  }
  process_sets().add(id, set);
  return {};
}

void World::remove_process_set(int id) {
  ProcessSet set;
  (void)process_sets().find(id, &set);
  if (set.engine) {
    const Watchdog watchdog(
        settings_, settings_.timeout_seconds,
        "hvd.remove_process_set() waits for another rank, which does not go on.");
    set.engine->announce_leaving("removed the process set");
    const bool all_left = set.engine->leave(-1) == Engine::LeaveResult::all_left;
    process_sets().remove(id);
    if (all_left) return set.engine->close();
    new std::shared_ptr<Engine>(set.engine);  // for ever: its messages may still be under way
  }
  process_sets().remove(id);
}

Engine::LeaveResult World::leave(const std::string& reason, double seconds) {
  if (!initialized() || process_sets().forked()) return Engine::LeaveResult::all_left;
  std::vector<std::shared_ptr<Engine>> engines = process_sets().engines();
  recorder_->note_end();
  recorder_->trace(-1);  // no rank has left before all have closed theirs
  recorder_->flight().leaving(reason);
  for (const auto& engine : engines) engine->announce_leaving("left the job: " + reason);
  // The worst result of all sets, which share the time.
  Engine::LeaveResult result = Engine::LeaveResult::all_left;
  const auto start = Clock::now();
  for (const auto& engine : engines) {
    const double rest = seconds < 0 ? seconds : std::max(0.0, seconds - seconds_since(start));
    result = std::max(result, engine->leave(rest));
  }
  all_left_together_ = result == Engine::LeaveResult::all_left;
  if (all_left_together_) {
    process_sets().clear();
    for (const auto& engine : engines) engine->close();
    HVD_MPI(MPI_Comm_free(&job_));
    initialized_ = false;
  }
  return result;
}

void World::finalize(bool is_now) {
  int finalized = 0;
  HVD_MPI(MPI_Finalized(&finalized));
  if (!initialized_mpi_ || !all_left_together_ || finalized) return;
  std::optional<Watchdog> watchdog;  // processes outside of the job take as long as they like
  if (ranks_in(MPI_COMM_WORLD) == rank_info_.size) {
    watchdog.emplace(settings_, is_now ? settings_.timeout_seconds : 0,
                     "MPI_Finalize waits for another rank, which does not go on.");
  }
  HVD_MPI(MPI_Finalize());
}

Status look_up(const std::string& what, int process_set, int* value) {
  ProcessSet set;
  if (Status status = process_sets().find(process_set, &set); !status.ok()) return status;
  const RankInfo& info = World::instance().rank_info();
  if (what == "rank") *value = info.rank;
  if (what == "size") *value = set.size;
  if (what == "set_rank") *value = set.rank;
  if (what == "local_rank") *value = info.local_rank;
  if (what == "local_size") *value = info.local_size;
  if (what == "included") *value = set.rank < 0 ? 0 : 1;
  return {};
}

}  // namespace hvd
