#include "core/world.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/collectives.h"
#include "core/kernel_api.h"
#include "core/mpi_transport.h"

namespace hvd {
namespace {

constexpr const char* kNotInitialized =
    "hvd_keras is not initialised in this process. Call hvd.init() first.";

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

// Of these ranks of a communicator; collective among them alone. Calls with other tags do not meet.
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
  if (Status status = start_mpi(); !status.ok()) return status;
  if (Status status = choose_job(ranks, communicator); !status.ok()) return status;
  MPI_Comm_rank(job_, &place_.rank);
  MPI_Comm_size(job_, &place_.size);
  MPI_Comm local, cross;
  MPI_Comm_split_type(job_, MPI_COMM_TYPE_SHARED, place_.rank, MPI_INFO_NULL, &local);
  MPI_Comm_rank(local, &place_.local_rank);
  MPI_Comm_size(local, &place_.local_size);
  MPI_Comm_split(job_, place_.local_rank, place_.rank, &cross);
  MPI_Comm_rank(cross, &place_.cross_rank);
  MPI_Comm_size(cross, &place_.cross_size);
  MPI_Comm_free(&local);
  MPI_Comm_free(&cross);

  std::vector<int> all(place_.size);
  std::iota(all.begin(), all.end(), 0);
  auto engine = std::make_shared<Engine>(std::make_unique<MpiTransport>(job_, all), settings_);
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[0] = {all, std::move(engine)};
  began_ = true;
  return {};
}

Status World::add_process_set(int id, const std::vector<int>& ranks) {
  std::shared_ptr<Engine> engine;
  if (std::find(ranks.begin(), ranks.end(), place_.rank) != ranks.end()) {
    MPI_Comm members = communicator_of(job_, ranks, id);
    engine = std::make_shared<Engine>(std::make_unique<MpiTransport>(members, ranks), settings_);
    MPI_Comm_free(&members);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = {ranks, std::move(engine)};
  return {};
}

void World::remove_process_set(int id) {
  const std::shared_ptr<Engine> leaving = engine(id);
  if (leaving) {
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

Status World::place_in(int process_set, int* rank, int* size) {
  if (!initialized()) return Status::error(Code::failed_precondition, kNotInitialized);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(process_set);
  if (found == sets_.end()) {
    return Status::error(Code::failed_precondition,
                         "there is no process set " + std::to_string(process_set) +
                             ". Add it first (hvd.add_process_set), on every rank.");
  }
  const std::vector<int>& ranks = found->second.ranks;
  const auto own = std::find(ranks.begin(), ranks.end(), place_.rank);
  *rank = own == ranks.end() ? -1 : static_cast<int>(own - ranks.begin());
  *size = static_cast<int>(ranks.size());
  return {};
}

void World::submit(Request request) {
  int rank = 0, size = 0;
  Status status = place_in(request.process_set, &rank, &size);
  if (status.ok() && rank < 0) {
    status =
        Status::error(Code::invalid_argument,
                      identity(request) + ": this rank, " + std::to_string(place_.rank) +
                          ", is not in process set " + std::to_string(request.process_set) + ".");
  }
  const std::shared_ptr<Engine> serving = status.ok() ? engine(request.process_set) : nullptr;
  if (serving) return serving->submit(std::move(request));
  request.done(status);
}

Engine::Farewell World::leave(const std::string& reason, double seconds) {
  if (!initialized()) return Engine::Farewell::together;
  std::vector<std::shared_ptr<Engine>> engines;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, set] : sets_) {
      if (set.engine) engines.push_back(set.engine);
    }
  }
  for (const auto& engine : engines) engine->announce_leaving(reason);
  // Of all sets, the worst.
  Engine::Farewell farewell = Engine::Farewell::together;
  for (const auto& engine : engines) farewell = std::max(farewell, engine->leave(seconds));
  all_left_together_ = farewell == Engine::Farewell::together;
  if (all_left_together_) {
    engines.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    sets_.clear();
    MPI_Comm_free(&job_);
    began_ = false;
  }
  return farewell;
}

void World::finalize() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (began_mpi_ && all_left_together_ && !finalized) MPI_Finalize();
}

void submit(Request request) { World::instance().submit(std::move(request)); }

bool keeps_shape(Kind kind) { return collective(kind).keeps_shape; }

Status look_up(const std::string& what, int process_set, int* value) {
  World& world = World::instance();
  int rank, size;
  if (Status status = world.place_in(process_set, &rank, &size); !status.ok()) return status;
  const Place& place = world.place();
  if (what == "rank") *value = place.rank;
  if (what == "size") *value = size;
  if (what == "local_rank") *value = place.local_rank;
  if (what == "local_size") *value = place.local_size;
  if (what == "included") *value = rank < 0 ? 0 : 1;
  return {};
}

}  // namespace hvd
