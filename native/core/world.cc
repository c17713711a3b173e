#include "core/world.h"

#include <mpi.h>

#include <utility>

#include "core/collectives.h"
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

}  // namespace

World& World::instance() {
  // Never destroyed: an engine that could not leave still has its thread in MPI when the process
  // ends.
  static World* world = new World();
  return *world;
}

Status World::init() {
  if (initialized()) return {};
  Settings settings;
  if (Status status = read_settings(&settings); !status.ok()) return status;

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
  MPI_Comm_rank(MPI_COMM_WORLD, &place_.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place_.size);
  MPI_Comm local, cross;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, place_.rank, MPI_INFO_NULL, &local);
  MPI_Comm_rank(local, &place_.local_rank);
  MPI_Comm_size(local, &place_.local_size);
  MPI_Comm_split(MPI_COMM_WORLD, place_.local_rank, place_.rank, &cross);
  MPI_Comm_rank(cross, &place_.cross_rank);
  MPI_Comm_size(cross, &place_.cross_size);
  MPI_Comm_free(&local);
  MPI_Comm_free(&cross);

  engine_ = std::make_unique<Engine>(std::make_unique<MpiTransport>(MPI_COMM_WORLD), settings);
  return {};
}

void World::submit(Request request) {
  if (!initialized())
    return request.done(Status::error(Code::failed_precondition, kNotInitialized));
  engine_->submit(std::move(request));
}

Engine::Farewell World::leave(const std::string& reason, double seconds) {
  if (!initialized()) return Engine::Farewell::together;
  const Engine::Farewell farewell = engine_->leave(reason, seconds);
  all_left_together_ = farewell == Engine::Farewell::together;
  if (all_left_together_) engine_.reset();
  return farewell;
}

void World::finalize() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (began_mpi_ && all_left_together_ && !finalized) MPI_Finalize();
}

void submit(Request request) { World::instance().submit(std::move(request)); }

bool keeps_shape(Kind kind) { return collective(kind).keeps_shape; }

}  // namespace hvd
