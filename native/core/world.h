// The life of this process among the others: MPI, its place in the job, the engine.
#pragma once

#include <memory>
#include <string>

#include "core/engine.h"
#include "core/request.h"
#include "core/status.h"

#define HVD_EXPORT __attribute__((visibility("default")))

namespace hvd {

struct Place {
  int rank, size;              // in the job
  int local_rank, local_size;  // on this host
  int cross_rank, cross_size;  // among the ranks with this local_rank, one per host
};

class World {
 public:
  static World& instance();

  Status init();
  bool initialized() const { return engine_ != nullptr; }
  const Place& place() const { return place_; }
  void submit(Request request);
  Engine::Farewell leave(const std::string& reason, double seconds);
  // Ends MPI if this library began it and all ranks left together; otherwise MPI_Finalize would
  // wait for ranks that never come.
  void finalize();

 private:
  World() = default;

  Place place_{};
  std::unique_ptr<Engine> engine_;
  bool began_mpi_ = false;
  bool all_left_together_ = true;
};

// For kernels: hands a request to the engine of this process.
HVD_EXPORT void submit(Request request);

// For kernels: whether outputs of this kind have the inputs' shapes.
HVD_EXPORT bool keeps_shape(Kind kind);

}  // namespace hvd
