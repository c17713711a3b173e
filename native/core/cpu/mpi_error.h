// What becomes of an error of MPI: it ends the job. mpi4py makes MPI return errors where it would
// otherwise end the process, and after one no buffer can be relied on.
#pragma once

#include <mpi.h>

#include <functional>
#include <string>

namespace hvd {

// What to do with the text of an error before the job is aborted. Once, at init.
void before_mpi_aborts(std::function<void(const std::string& why)> act);

[[noreturn]] void abort_for_mpi_error(int code, const char* call);

// Around each call.
#define HVD_MPI(...)                                       \
  do {                                                     \
    if (const int code = __VA_ARGS__; code != MPI_SUCCESS) \
      abort_for_mpi_error(code, #__VA_ARGS__);             \
  } while (false)

}  // namespace hvd
