// What is common to messages (network.cc) and to MPI's operations of many ranks (operations.cc).
#pragma once

#include <mpi.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/simulate/simulation.h"

struct SimulatedRequest {
  bool done = false;
  char* data = nullptr;  // of a receive, or the result of a collective
  int64_t bytes = 0;
  int from = 0, tag = 0;                // of a receive
  std::vector<int64_t> starts, counts;  // of the parts of a result
};

namespace hvd::sim {

struct Communicator {
  std::vector<int> ranks;            // of the job
  std::map<int, uint64_t> calls;     // by rank of the job
  std::map<std::string, int> parts;  // communicators made of it

  int rank() const { return rank_of(simulation->process().rank); }
  int rank_of(int of_job) const {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), of_job) - ranks.begin());
  }
  int size() const { return static_cast<int>(ranks.size()); }
};

std::deque<Communicator>& communicators();

int64_t bytes_of(MPI_Datatype type);

// Lets a process act when a message that is sent now arrives, if it does.
void deliver(int from, int to, std::function<void()> action);

// At the beginning of each call of MPI.
int enter();

// Adds to the traffic of the rank that runs.
void count(uint64_t messages, uint64_t bytes);

MPI_Request new_request(MPI_Request* to, void* data = nullptr, int64_t bytes = 0);

// Waits for it, without a limit.
int finished(MPI_Request* request);

}  // namespace hvd::sim
