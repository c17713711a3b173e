// The C API of the core, for ctypes. Functions that can fail return a code of status.h: 0, or
// another and leave a text in hvd_error().
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/base/cores.h"
#include "core/base/export.h"
#include "core/base/log.h"
#include "core/base/settings.h"
#include "core/gpu/cuda_api.h"
#include "core/gpu/gpu_library.h"
#include "core/gpu/gpu_transport.h"
#include "core/gpu/nccl_api.h"
#include "core/kernel_api.h"
#include "core/request/collectives.h"
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

struct TensorOfC {
  void* data;
  const char* dtype;
  int dims;
  const int64_t* shape;
};

// What a request has besides tensors, by the names that the tables of the core have: where they
// are, in the host's memory (-1) or on a CUDA device; the stream that makes the inputs and will use
// the results; and what gives memory for a result. Null: the core does, in the host's memory.
struct CallOfC {
  const char *kind, *name, *note, *reduction, *wire;
  int process_set, root;
  double prescale, postscale;
  int device;
  void* stream;
  void* (*allocate)(int index, int dims, const int64_t* shape);
};

// A request on its way, with the results that the core has allocated.
struct Pending {
  std::promise<hvd::Status> promise;
  std::future<hvd::Status> done = promise.get_future();
  bool kept = false;  // late messages may still be written into its tensors
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<hvd::Shape> shapes;
};

}  // namespace

extern "C" {

HVD_EXPORT const char* hvd_error() { return error.c_str(); }

// Of `count` ranks of MPI_COMM_WORLD (0: of all), or of the processes of an MPI_Comm (null: not).
// `cpu_quota`: cores' worth of CPU time that this process has, or infinity.
HVD_EXPORT int hvd_init(const int* ranks, int count, const void* communicator, double cpu_quota) {
  hvd::cpu_quota = cpu_quota;
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

// All that this rank waits for, and will, fails with this reason. After hvd_init().
HVD_EXPORT void hvd_give_up(const char* reason) {
  log_error([&](hvd::World& world) { world.recorder()->note_abort(reason); });
}

// This process's counters since hvd_init(), as JSON; see docs/observing.md.
HVD_EXPORT const char* hvd_stats() {
  thread_local std::string text;
  text = hvd::World::instance().recorder()->stats();
  return text.c_str();
}

// Appends each request that has run to this file, which it closes; -1: to none. After hvd_init().
HVD_EXPORT void hvd_trace(int descriptor) {
  log_error([&](hvd::World& world) { world.recorder()->trace(descriptor); });
}

// Keeps this process's last requests in a file. Requests that fail are told to a socket, see
// flight_recorder.h. After hvd_init(), before any request.
HVD_EXPORT void hvd_record_requests(int descriptor, int socket) {
  log_error([&](hvd::World& world) {
    hvd::FlightRecorder& flight = world.recorder()->flight();
    flight.listen(socket);
    flight.open(descriptor, world.rank_info().rank, world.rank_info().size);
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

HVD_EXPORT void hvd_finalize(int is_now) {
  log_error([=](hvd::World& world) { world.finalize(is_now != 0); });
}

// Ends all ranks of the job.
HVD_EXPORT void hvd_abort(int exit_status) { MPI_Abort(MPI_COMM_WORLD, exit_status); }

// Submits a request of tensors, which must stay until hvd_release(). Results are written to
// `outputs`, one for each input, if their shapes are the inputs' (they may be the inputs); else
// `outputs` is null.
HVD_EXPORT void* hvd_submit(const CallOfC* call, const TensorOfC* inputs, int count,
                            void* const* outputs) {
  auto* const pending = new Pending;
  hvd::Request request;
  for (const hvd::Collective& row : hvd::collectives()) {
    if (row.name == std::string(call->kind)) request.kind = row.kind;
  }
  request.name = call->name;
  request.note = call->note;
  request.process_set = call->process_set;
  request.root = call->root;
  hvd::set_by_name(call->reduction, hvd::Reduction::adasum, &request.reduction);
  hvd::set_by_name(call->wire, hvd::DType::float64, &request.wire);
  request.prescale = call->prescale;
  request.postscale = call->postscale;
  request.device = call->device;
  request.stream = call->stream;
  for (int i = 0; i < count; ++i) {
    const TensorOfC& input = inputs[i];
    request.inputs.push_back({input.data, {}, hvd::Shape(input.shape, input.shape + input.dims)});
    hvd::set_by_name(input.dtype, hvd::DType::float64, &request.inputs.back().dtype);
    if (outputs) request.outputs.push_back(outputs[i]);
  }
  const auto dtypes = [inputs = request.inputs](size_t i) {
    return i < inputs.size() ? inputs[i].dtype : hvd::DType::int32;  // join's last rank
  };
  request.allocate = [pending, dtypes, given = call->allocate](
                         size_t index, const hvd::Shape& shape, void** data) {
    const size_t bytes = hvd::elements(shape) * hvd::size_of(dtypes(index));
    auto memory = std::unique_ptr<char[]>(given ? nullptr : new (std::nothrow) char[bytes]);
    *data = given ? given(static_cast<int>(index), static_cast<int>(shape.size()), shape.data())
                  : memory.get();
    if (!*data && bytes > 0) {
      return hvd::Status::error(hvd::Code::internal,
                                "no memory for a result of " + std::to_string(bytes) + " bytes");
    }
    pending->memory.resize(std::max(pending->memory.size(), index + 1));
    pending->shapes.resize(pending->memory.size());
    pending->memory[index] = std::move(memory);
    pending->shapes[index] = shape;
    return hvd::Status();
  };
  request.keep = [pending] { pending->kept = true; };
  request.done = [pending](const hvd::Status& status) { pending->promise.set_value(status); };
  hvd::submit(std::move(request));
  return pending;
}

// Waits for a request, on a device until its work is enqueued, for which the stream then waits. Its
// code, and hvd_error().
HVD_EXPORT int hvd_wait(Pending* pending) {
  return result([&](hvd::World&) { return pending->done.get(); });
}

// A result that the core has allocated: its number of dimensions.
HVD_EXPORT int hvd_result(const Pending* pending, int index, const void** data,
                          const int64_t** shape) {
  *data = pending->memory[index].get();
  *shape = pending->shapes[index].data();
  return static_cast<int>(pending->shapes[index].size());
}

// Frees a request that has been waited for, and its results; 0 if its tensors must stay for ever.
HVD_EXPORT int hvd_release(Pending* pending) {
  if (pending->kept) return 0;
  delete pending;
  return 1;
}

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
