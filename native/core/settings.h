// The only place where the core reads its environment: once, at init.
#pragma once

#include <string>

#include "core/status.h"

namespace hvd {

// How sums cross between hosts: straight to the rank that adds them, around a ring, or as MPI does.
enum class Allreduce { direct, ring, mpi };

struct Settings {
  // HVD_STALL_WARNING_SECONDS: how long requests may wait for other ranks before a warning names
  // them; 0: never.
  double stall_warning_seconds = 60.0;
  // HVD_TIMEOUT_SECONDS: how long before they fail on all ranks; 0: never.
  double timeout_seconds = 600.0;
  // HVD_ALLREDUCE: auto (direct), ring or mpi.
  Allreduce allreduce = Allreduce::direct;
  // HVD_TIMELINE: the file to which rank 0 writes what all ranks do; empty: none.
  std::string timeline;
  // HVD_STATS_DIRECTORY: a folder in which each rank leaves its counters at its end; empty: none.
  std::string stats_directory;
};

Status read_settings(Settings* settings);

}  // namespace hvd
