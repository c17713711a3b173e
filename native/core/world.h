// This process in its job: MPI, its ranks, the engines of its process sets.
#pragma once

#include <mpi.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/engine/recorder.h"
#include "core/request/request.h"

namespace hvd {

struct RankInfo {
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
  bool initialized() const { return began_; }
  const RankInfo& rank_info() const { return rank_info_; }

  // A process set has its own engine. Every rank of the job calls both with the same arguments.
  Status add_process_set(int id, const std::vector<int>& ranks);
  void remove_process_set(int id);

  // This process's rank in a set (-1: not a member), the set's size and its engine (null: not a
  // member). An error if there is no such set.
  Status rank_in(int process_set, int* rank, int* size, std::shared_ptr<Engine>* engine = nullptr);

  // What this process has done since init; null before it.
  const std::shared_ptr<Recorder>& recorder() const { return recorder_; }

  void submit(Request request);
  Engine::LeaveResult leave(const std::string& reason, double seconds);
  // Ends MPI if this library began it and all ranks left together; otherwise MPI_Finalize would
  // wait for ranks that never come.
  void finalize();

 private:
  struct ProcessSet {
    std::vector<int> ranks;
    std::shared_ptr<Engine> engine;  // null: this process is not a member
  };

  World() = default;
  Status start_mpi();
  Status choose_job(const std::vector<int>& ranks, const MPI_Comm* communicator);
  Status begin_timeline();
  void leave_stats() const;
  std::shared_ptr<Engine> engine(int process_set);

  Settings settings_;
  std::shared_ptr<Recorder> recorder_;
  MPI_Comm job_ = MPI_COMM_NULL;
  RankInfo rank_info_{};
  bool began_ = false;
  bool began_mpi_ = false;
  bool all_left_together_ = true;

  std::mutex mutex_;  // guards the sets
  std::map<int, ProcessSet> sets_;
};

}  // namespace hvd
