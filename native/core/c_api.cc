// The C API of the core, for ctypes. Functions that can fail return a code of status.h: 0, or
// another and leave a text in hvd_error().
#include <dlfcn.h>
#include <mpi.h>

#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/export.h"
#include "core/base/log.h"
#include "core/base/settings.h"
#include "core/gpu/cuda_api.h"
#include "core/gpu/gpu_library.h"
#include "core/gpu/gpu_transport.h"
#include "core/gpu/nccl_api.h"
#include "core/world.h"

namespace {
thread_local std::string error;

// A hvd::Code: 0 is ok. No exception passes an interface of C.
template <typename Call>
int result(const Call& call) {
  hvd::Status status;
  try {
    status = call(hvd::World::instance());
  } catch (const std::exception& thrown) {
    status = hvd::Status::error(hvd::Code::internal, thrown.what());
  }
  error = status.message;
  return static_cast<int>(status.code);
}

// Of functions that have no other way to report an error.
template <typename Call>
void log_error(const Call& call) {
  const int code = result([&](hvd::World& world) {
    call(world);
    return hvd::Status();
  });
  if (code != 0) hvd::log(hvd::LogLevel::error, error);
}

// Errors in settings are reported by hvd_init().
hvd::Settings gpu_settings() {
  hvd::Settings settings;
  (void)hvd::read_settings(&settings);
  return settings;
}

}  // namespace

extern "C" {

HVD_EXPORT const char* hvd_error() { return error.c_str(); }

// Of `count` ranks of MPI_COMM_WORLD (0: of all), or of the processes of an MPI_Comm (null: not).
HVD_EXPORT int hvd_init(const int* ranks, int count, const void* communicator) {
  return result([&](hvd::World& world) {
    return world.init({ranks, ranks + count}, static_cast<const MPI_Comm*>(communicator));
  });
}

HVD_EXPORT int hvd_add_process_set(int id, const int* ranks, int count) {
  return result(
      [&](hvd::World& world) { return world.add_process_set(id, {ranks, ranks + count}); });
}

HVD_EXPORT void hvd_remove_process_set(int id) {
  log_error([&](hvd::World& world) { world.remove_process_set(id); });
}

// Lines on stderr from this level on: 0 debug, 1 info, 2 warning, 3 error. After hvd_init().
HVD_EXPORT void hvd_set_log(int level) {
  hvd::set_log(static_cast<hvd::LogLevel>(level), hvd::World::instance().rank_info().rank);
}

HVD_EXPORT int hvd_initialized() { return hvd::World::instance().initialized(); }

// rank, size, local_rank, local_size, cross_rank, cross_size, homogeneous.
HVD_EXPORT void hvd_rank_info(int* seven) {
  static_assert(sizeof(hvd::RankInfo) == 7 * sizeof(int));
  std::memcpy(seven, &hvd::World::instance().rank_info(), sizeof(hvd::RankInfo));
}

// Leaves the job: this rank submits nothing more. Waits at most `seconds` (< 0: without limit).
// 0: all ranks have left. 1: others still waited for this rank, and got an error. 2: no answer in
// time. 3: another rank had left while this one waited for it. 4: a rank had aborted the job's
// transport, most often after a timeout.
HVD_EXPORT int hvd_leave(const char* reason, double seconds) {
  auto left = hvd::Engine::LeaveResult::aborted;
  log_error([&](hvd::World& world) { left = world.leave(reason, seconds); });
  return static_cast<int>(left);
}

// This process's counters since hvd_init(), as JSON; see docs/observing.md.
HVD_EXPORT const char* hvd_stats() {
  thread_local std::string text;
  text = hvd::World::instance().recorder()->stats();
  return text.c_str();
}

// On rank 0, after hvd_init().
HVD_EXPORT int hvd_start_timeline(const char* path) {
  return result([&](hvd::World& world) { return world.recorder()->start_timeline(path); });
}

HVD_EXPORT void hvd_stop_timeline() {
  log_error([](hvd::World& world) { world.recorder()->stop_timeline(); });
}

// Keeps this process's last requests in a file. Requests that fail are told to a socket, see
// flight_recorder.h. After hvd_init(), before any request.
HVD_EXPORT int hvd_record_requests(const char* path, int socket) {
  return result([&](hvd::World& world) {
    hvd::FlightRecorder& flight = world.recorder()->flight();
    flight.listen(socket);
    return flight.open(path, world.rank_info().rank, world.rank_info().size);
  });
}

// Folders to search for CUDA and NCCL, separated by colons. Before the first use of either.
HVD_EXPORT void hvd_gpu_folders(const char* folders) {
  std::vector<std::string> all;
  std::istringstream text(folders);
  for (std::string one; std::getline(text, one, ':');) all.push_back(one);
  hvd::set_gpu_folders(all);
}

// The CUDA device of this process.
HVD_EXPORT void hvd_use_gpu(int device) { hvd::set_default_gpu(device); }

// 1: all ranks are about to agree to add a process set; -1: they have, or not.
HVD_EXPORT void hvd_expect_process_sets(int more) { hvd::expect_process_sets(more); }

// The versions and files of CUDA's runtime and of NCCL, or why there is none.
HVD_EXPORT const char* hvd_cuda() {
  thread_local std::string text;
  const hvd::CudaApi* cuda = hvd::cuda_api(gpu_settings(), &text);
  if (cuda) text = hvd::cuda_version_text(cuda->version) + ", " + cuda->file;
  return text.c_str();
}

HVD_EXPORT const char* hvd_nccl() {
  thread_local std::string text;
  const hvd::NcclApi* nccl = hvd::nccl_api(gpu_settings(), &text);
  if (nccl) text = hvd::nccl_version_text(nccl->version) + ", " + nccl->file;
  return text.c_str();
}

// As NCCL counts; 0: there is none.
HVD_EXPORT int hvd_nccl_version() {
  std::string why;
  const hvd::NcclApi* nccl = hvd::nccl_api(gpu_settings(), &why);
  return nccl ? nccl->version : 0;
}

HVD_EXPORT void hvd_finalize() {
  log_error([](hvd::World& world) { world.finalize(); });
}

// Ends all ranks of the job.
HVD_EXPORT void hvd_abort(int exit_status) { MPI_Abort(MPI_COMM_WORLD, exit_status); }

// The version text and the file of the MPI library in use; valid before hvd_init().
HVD_EXPORT const char* hvd_mpi_version() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(text, &length);
  return text;
}

HVD_EXPORT const char* hvd_mpi_file() {
  static Dl_info info;
  return dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) ? info.dli_fname : "";
}

}  // extern "C"
