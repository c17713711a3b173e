#include "core/base/settings.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "core/base/numbers.h"

namespace hvd {
namespace {

Status read_seconds(const char* name, double* value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return {};
  double parsed = 0;
  if (!parse(text, &parsed) || !std::isfinite(parsed) || parsed < 0) {
    return Status::error(Code::invalid_argument,
                         std::string(name) + " is '" + text +
                             "', expected a number of seconds, 0 or more. Correct or unset it.");
  }
  *value = parsed;
  return {};
}

Status read_allreduce(Allreduce* value) {
  const char* given = std::getenv("HVD_ALLREDUCE");
  const std::string text = given == nullptr ? "" : given;
  static const std::map<std::string, Allreduce> known = {{"", Allreduce::automatic},
                                                         {"auto", Allreduce::automatic},
                                                         {"direct", Allreduce::direct},
                                                         {"grid", Allreduce::grid}};
  const auto found = known.find(text);
  if (found == known.end()) {
    return Status::error(
        Code::invalid_argument,
        "HVD_ALLREDUCE is '" + text + "', expected auto, direct or grid. Correct or unset it.");
  }
  *value = found->second;
  return {};
}

std::string read_text(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

Status read_backend(const char* name, GpuBackend* backend) {
  const std::string text = read_text(name);
  if (text == "NCCL") *backend = GpuBackend::nccl;
  if (text == "MPI") *backend = GpuBackend::mpi;
  if (text.empty() || text == "NCCL" || text == "MPI") return {};
  return Status::error(Code::invalid_argument, std::string(name) + " is '" + text +
                                                   "', expected NCCL or MPI. Correct or unset it.");
}

}  // namespace

Status read_settings(Settings* settings) {
  settings->timeline = read_text("HVD_TIMELINE");
  settings->cudart_library = read_text("HVD_CUDART_LIBRARY");
  settings->nccl_library = read_text("HVD_NCCL_LIBRARY");
  if (Status status = read_backend("HVD_GPU_OPERATIONS", &settings->gpu_operations); !status.ok())
    return status;
  const std::pair<const char*, GpuBackend*> backends[] = {
      {"HVD_GPU_ALLREDUCE", &settings->gpu_allreduce},
      {"HVD_GPU_ALLGATHER", &settings->gpu_allgather},
      {"HVD_GPU_BROADCAST", &settings->gpu_broadcast},
  };
  for (const auto& [name, backend] : backends) {
    *backend = settings->gpu_operations;
    if (Status status = read_backend(name, backend); !status.ok()) return status;
  }
  for (const Status& status :
       {read_allreduce(&settings->allreduce),
        read_seconds("HVD_STALL_WARNING_SECONDS", &settings->stall_warning_seconds),
        read_seconds("HVD_TIMEOUT_SECONDS", &settings->timeout_seconds),
        read_seconds("HVD_FIRST_TIMEOUT_SECONDS", &settings->first_timeout_seconds),
        read_seconds("HVD_MISMATCH_SECONDS", &settings->mismatch_seconds)}) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace hvd
