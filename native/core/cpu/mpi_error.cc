#include "core/cpu/mpi_error.h"

#include <unistd.h>

#include <utility>

#include "core/base/log.h"

namespace hvd {
namespace {

// Never destroyed: engines' threads may outlive main().
std::function<void(const std::string&)>* act_before = nullptr;

}  // namespace

void before_mpi_aborts(std::function<void(const std::string&)> act) {
  act_before = new std::function<void(const std::string&)>(std::move(act));
}

void abort_for_mpi_error(int code, const char* call) {
  const std::string text = call;
  char error[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, error, &length) != MPI_SUCCESS) length = 0;
  const std::string why =
      text.substr(0, text.find('(')) +
      " failed: " + (length > 0 ? std::string(error, length) : "error " + std::to_string(code)) +
      ". The job is aborted, since messages may be lost. Look for what MPI, the "
      "network or another rank has reported before.";
  log(LogLevel::error, why);
  if (act_before) (*act_before)(why);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}

}  // namespace hvd
