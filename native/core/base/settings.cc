#include "core/base/settings.h"

#include <cmath>
#include <cstdlib>
#include <map>

#include "core/base/numbers.h"

namespace hvd {
namespace {

std::string read_text(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

Status wrong(const char* name, const std::string& text, const std::string& expected) {
  return Status::error(Code::invalid_argument, std::string(name) + " is '" + text + "', expected " +
                                                   expected + ". Correct or unset it.");
}

Status read(const char* name, double* seconds) {
  const std::string text = read_text(name);
  double parsed = 0;
  if (text.empty()) return {};
  if (!parse(text, &parsed) || !std::isfinite(parsed) || parsed < 0)
    return wrong(name, text, "a number of seconds, 0 or more");
  *seconds = parsed;
  return {};
}

Status read(const char* name, Allreduce* algorithm) {
  const std::string text = read_text(name);
  static const std::map<std::string, Allreduce> known = {{"", Allreduce::automatic},
                                                         {"auto", Allreduce::automatic},
                                                         {"direct", Allreduce::direct},
                                                         {"grid", Allreduce::grid}};
  const auto found = known.find(text);
  if (found == known.end()) return wrong(name, text, "auto, direct or grid");
  *algorithm = found->second;
  return {};
}

Status read(const char* name, GpuBackend* backend) {
  const std::string text = read_text(name);
  if (text == "NCCL") *backend = GpuBackend::nccl;
  if (text == "MPI") *backend = GpuBackend::mpi;
  if (text.empty() || text == "NCCL" || text == "MPI") return {};
  return wrong(name, text, "NCCL or MPI");
}

}  // namespace

Status read_settings(Settings* settings) {
  settings->traces = !read_text("HVD_TIMELINE").empty();
  settings->ranks_share_gpus = read_text("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
  settings->cudart_library = read_text("HVD_CUDART_LIBRARY");
  settings->nccl_library = read_text("HVD_NCCL_LIBRARY");
  if (Status status = read("HVD_GPU_OPERATIONS", &settings->gpu_operations); !status.ok())
    return status;
  settings->gpu_allreduce = settings->gpu_allgather = settings->gpu_broadcast =
      settings->gpu_operations;
  for (const Status& status : {read("HVD_GPU_ALLREDUCE", &settings->gpu_allreduce),
                               read("HVD_GPU_ALLGATHER", &settings->gpu_allgather),
                               read("HVD_GPU_BROADCAST", &settings->gpu_broadcast),
                               read("HVD_ALLREDUCE", &settings->allreduce),
                               read("HVD_STALL_WARNING_SECONDS", &settings->stall_warning_seconds),
                               read("HVD_TIMEOUT_SECONDS", &settings->timeout_seconds),
                               read("HVD_FIRST_TIMEOUT_SECONDS", &settings->first_timeout_seconds),
                               read("HVD_MISMATCH_SECONDS", &settings->mismatch_seconds)}) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace hvd
