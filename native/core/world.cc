#include "core/world.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/watchdog.h"
#include "core/cpu/cluster_transport.h"
#include "core/cpu/host_transport.h"
#include "core/cpu/mpi_transport.h"
#include "core/gpu/cuda_api.h"
#include "core/gpu/gpu_transport.h"
#include "core/kernel_api.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

constexpr const char* kNotInitialized =
    "hvd_keras is not initialised in this process. Call hvd.init() first.";

// How long a script whose GPU is stuck may live on, to end by itself.
constexpr double kStrandedSeconds = 2.0;

const char* name_of_thread_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

// A communicator of these ranks; collective among them only. Calls with different tags do not
// match.
MPI_Comm communicator_of(MPI_Comm of, const std::vector<int>& ranks, int tag) {
  MPI_Group all, some;
  MPI_Comm_group(of, &all);
  MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
  MPI_Comm members;
  MPI_Comm_create_group(of, some, tag, &members);
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  return members;
}

// The fastest way between these ranks of the job; collective.
std::unique_ptr<Transport> transport_between(MPI_Comm communicator, const std::vector<int>& ranks,
                                             Allreduce way) {
  auto mpi = std::make_unique<MpiTransport>(communicator, ranks);
  if (mpi->size() == 1) return mpi;
  MPI_Comm host;
  MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, mpi->rank(), MPI_INFO_NULL, &host);
  int neighbours, most;
  MPI_Comm_size(host, &neighbours);
  MPI_Allreduce(&neighbours, &most, 1, MPI_INT, MPI_MAX, communicator);
  std::unique_ptr<Transport> fastest;
  try {
    if (most == mpi->size()) {
      fastest = std::make_unique<HostTransport>(&mpi);
    } else {
      fastest = std::make_unique<ClusterTransport>(&mpi, host, way);
    }
  } catch (const std::runtime_error& error) {
    log(LogLevel::warning, std::string("the ranks of this host cannot share memory (") +
                               error.what() +
                               "), so all goes over MPI, which is slower. Is "
                               "/dev/shm full? Containers need --shm-size or --ipc=host.");
    fastest = std::move(mpi);
  }
  MPI_Comm_free(&host);
  return fastest;
}

// This process's stream waits for work that will never be done, and its script perhaps for that.
void end_soon(const std::string& why) {
  std::thread([why] {
    std::this_thread::sleep_for(std::chrono::duration<double>(kStrandedSeconds));
    log(LogLevel::error, "the GPU waits for work that will never be done, so the job ends: " + why);
    MPI_Abort(MPI_COMM_WORLD, kWaitedInVain);
  }).detach();
}

// The transport with one for GPUs around it, if any rank has CUDA; collective. Then all ranks have
// it: where one has joined, it must take part in what the others do with their GPUs.
std::unique_ptr<Transport> with_gpus(MPI_Comm communicator, std::unique_ptr<Transport> host,
                                     const Settings& settings) {
  std::string why_no_gpu;
  int found = cuda_api(settings, &why_no_gpu) != nullptr;
  MPI_Allreduce(MPI_IN_PLACE, &found, 1, MPI_INT, MPI_MAX, communicator);
  if (found) return std::make_unique<GpuTransport>(std::move(host), settings, end_soon);
  host->set_why_no_gpu(why_no_gpu);
  return host;
}

}  // namespace

World& World::instance() {
  // Never destroyed: an engine that could not leave still has its thread in MPI when the process
  // ends.
  static World* world = new World();
  return *world;
}

Status World::start_mpi() {
  int finalized = 0, begun = 0, level = MPI_THREAD_SINGLE;
  MPI_Finalized(&finalized);
  if (finalized) {
    return Status::error(
        Code::failed_precondition,
        "MPI has been finalised in this process and cannot begin again. Call hvd.init() before "
        "MPI.Finalize().");
  }
  MPI_Initialized(&begun);
  if (begun) {
    MPI_Query_thread(&level);
  } else {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    began_mpi_ = true;
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
    MPI_Comm_dup(*communicator, &job_);
    return {};
  }
  if (ranks.empty()) {
    MPI_Comm_dup(MPI_COMM_WORLD, &job_);
    return {};
  }
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
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
                             ", which comm does not list. Call hvd.init() only on those that it "
                             "lists, or give this process a list of its own.");
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
  MPI_Comm_rank(job_, &rank_info_.rank);
  MPI_Comm_size(job_, &rank_info_.size);
  MPI_Comm local, cross;
  MPI_Comm_split_type(job_, MPI_COMM_TYPE_SHARED, rank_info_.rank, MPI_INFO_NULL, &local);
  MPI_Comm_rank(local, &rank_info_.local_rank);
  MPI_Comm_size(local, &rank_info_.local_size);
  MPI_Comm_split(job_, rank_info_.local_rank, rank_info_.rank, &cross);
  MPI_Comm_rank(cross, &rank_info_.cross_rank);
  MPI_Comm_size(cross, &rank_info_.cross_size);
  MPI_Comm_free(&local);
  MPI_Comm_free(&cross);
  int bounds[2] = {rank_info_.local_size, -rank_info_.local_size};
  MPI_Allreduce(MPI_IN_PLACE, bounds, 2, MPI_INT, MPI_MAX, job_);
  rank_info_.homogeneous = bounds[0] == -bounds[1];

  recorder_ = std::make_shared<Recorder>(rank_info_.rank, rank_info_.size);
  if (Status status = begin_timeline(); !status.ok()) {
    MPI_Comm_free(&job_);
    return status;
  }
  std::vector<int> all(rank_info_.size);
  std::iota(all.begin(), all.end(), 0);
  auto engine = std::make_shared<Engine>(
      with_gpus(job_, transport_between(job_, all, settings_.allreduce), settings_), settings_,
      recorder_);
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[0] = {all, std::move(engine)};
  began_ = true;
  return {};
}

// Rank 0 alone writes it; if it cannot, all ranks get the error.
Status World::begin_timeline() {
  Status status;
  if (rank_info_.rank == 0 && !settings_.timeline.empty()) {
    status = recorder_->start_timeline(settings_.timeline);
    if (!status.ok()) status.message = "HVD_TIMELINE: rank 0 " + status.message;
  }
  int size = static_cast<int>(status.message.size());
  MPI_Bcast(&size, 1, MPI_INT, 0, job_);
  status.message.resize(size);
  MPI_Bcast(status.message.data(), size, MPI_CHAR, 0, job_);
  if (size > 0) status.code = Code::invalid_argument;
  return status;
}

// For hvdrun: to be read when the job is over.
void World::leave_stats() const {
  if (settings_.stats_directory.empty()) return;
  const std::string path =
      settings_.stats_directory + "/stats-" + std::to_string(rank_info_.rank) + ".json";
  const std::string unfinished = path + ".new";
  std::ofstream file(unfinished);
  file << recorder_->stats();
  file.close();
  if (!file || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    log(LogLevel::error, "cannot write the statistics to '" + path + "' (HVD_STATS_DIRECTORY)");
  }
}

Status World::add_process_set(int id, const std::vector<int>& ranks) {
  const Watchdog watchdog(settings_, settings_.timeout_seconds,
                          "hvd.add_process_set() waits for another rank, which does not go on.");
  std::shared_ptr<Engine> engine;
  if (std::find(ranks.begin(), ranks.end(), rank_info_.rank) != ranks.end()) {
    MPI_Comm members = communicator_of(job_, ranks, id);
    engine = std::make_shared<Engine>(
        with_gpus(members, transport_between(members, ranks, settings_.allreduce), settings_),
        settings_, recorder_, id);
    MPI_Comm_free(&members);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = {ranks, std::move(engine)};
  return {};
}

void World::remove_process_set(int id) {
  const std::shared_ptr<Engine> leaving = engine(id);
  if (leaving) {
    const Watchdog watchdog(
        settings_, settings_.timeout_seconds,
        "hvd.remove_process_set() waits for another rank, which does not go on.");
    leaving->announce_leaving("the process set was removed");
    leaving->leave(-1);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(id);
}

std::shared_ptr<Engine> World::engine(int process_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(process_set);
  return found == sets_.end() ? nullptr : found->second.engine;
}

Status World::rank_in(int process_set, int* rank, int* size, std::shared_ptr<Engine>* engine) {
  if (!initialized()) return Status::error(Code::failed_precondition, kNotInitialized);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(process_set);
  if (found == sets_.end()) {
    return Status::error(Code::failed_precondition,
                         "there is no process set " + std::to_string(process_set) +
                             ". Add it first (hvd.add_process_set), on every rank.");
  }
  const std::vector<int>& ranks = found->second.ranks;
  const auto own = std::find(ranks.begin(), ranks.end(), rank_info_.rank);
  *rank = own == ranks.end() ? -1 : static_cast<int>(own - ranks.begin());
  *size = static_cast<int>(ranks.size());
  if (engine) *engine = found->second.engine;
  return {};
}

void World::submit(Request request) {
  int rank = 0, size = 0;
  std::shared_ptr<Engine> serving;
  Status status = rank_in(request.process_set, &rank, &size, &serving);
  if (serving) return serving->submit(std::move(request));
  if (status.ok()) {
    status =
        Status::error(Code::invalid_argument,
                      identity(request) + ": this rank, " + std::to_string(rank_info_.rank) +
                          ", is not in process set " + std::to_string(request.process_set) + ".");
  }
  request.done(status);
}

Engine::LeaveResult World::leave(const std::string& reason, double seconds) {
  if (!initialized()) return Engine::LeaveResult::together;
  std::vector<std::shared_ptr<Engine>> engines;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, set] : sets_) {
      if (set.engine) engines.push_back(set.engine);
    }
  }
  recorder_->note_end();
  for (const auto& engine : engines) engine->announce_leaving(reason);
  // Of all sets, the worst.
  Engine::LeaveResult result = Engine::LeaveResult::together;
  for (const auto& engine : engines) result = std::max(result, engine->leave(seconds));
  leave_stats();
  all_left_together_ = result == Engine::LeaveResult::together;
  if (all_left_together_) {
    engines.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    sets_.clear();
    recorder_->stop_timeline();
    MPI_Comm_free(&job_);
    began_ = false;
  }
  return result;
}

void World::finalize() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!began_mpi_ || !all_left_together_ || finalized) return;
  const Watchdog watchdog(settings_, settings_.timeout_seconds,
                          "MPI_Finalize waits for another rank, which does not go on.");
  MPI_Finalize();
}

void submit(Request request) { World::instance().submit(std::move(request)); }

bool keeps_shape(Kind kind) { return collective(kind).keeps_shape; }

Status look_up(const std::string& what, int process_set, int* value) {
  World& world = World::instance();
  int rank, size;
  if (Status status = world.rank_in(process_set, &rank, &size); !status.ok()) return status;
  const RankInfo& place = world.rank_info();
  if (what == "rank") *value = place.rank;
  if (what == "size") *value = size;
  if (what == "set_rank") *value = rank;
  if (what == "local_rank") *value = place.local_rank;
  if (what == "local_size") *value = place.local_size;
  if (what == "included") *value = rank < 0 ? 0 : 1;
  return {};
}

}  // namespace hvd
