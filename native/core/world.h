// This process in its job: begins and ends MPI, knows its ranks, makes the engines of process sets.
#pragma once

#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/engine/recorder.h"

namespace hvd {

struct RankInfo {              // in the order of hvd_rank_info()
  int rank, size;              // in the job
  int local_rank, local_size;  // on this host
  int cross_rank, cross_size;  // among the ranks with this local_rank, one per host
  int homogeneous;             // 1: every host has the same number of ranks
};

class World {
 public:
  static World& instance();

  // The job is all of MPI_COMM_WORLD, or those of its ranks that are listed, or the processes of
  // `communicator`, which is duplicated.
  Status init(const std::vector<int>& ranks, const MPI_Comm* communicator);
  bool initialized() const { return initialized_; }
  const RankInfo& rank_info() const { return rank_info_; }

  // Every rank of the job calls both with the same arguments.
  Status add_process_set(int id, const std::vector<int>& ranks);
  void remove_process_set(int id);

  // What this process has done since init; null before it.
  const std::shared_ptr<Recorder>& recorder() const { return recorder_; }

  Engine::LeaveResult leave(const std::string& reason, double seconds);
  // Ends MPI if this library began it and all ranks left together; otherwise MPI_Finalize would
  // wait for ranks that never come. is_now: they have left just now, so each is about to come.
  void finalize(bool is_now);

 private:
  World() = default;
  Status start_mpi();
  Status choose_job(const std::vector<int>& ranks, const MPI_Comm* communicator);
  std::shared_ptr<Engine> new_engine(MPI_Comm members, const std::vector<int>& ranks, int id);

  Settings settings_;
  std::shared_ptr<Recorder> recorder_;
  MPI_Comm job_ = MPI_COMM_NULL;
  RankInfo rank_info_{};
  bool initialized_ = false;
  bool initialized_mpi_ = false;
  bool all_left_together_ = true;
};

}  // namespace hvd
