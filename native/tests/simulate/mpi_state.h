// What is common to messages (network.cc) and to MPI's operations of many ranks (operations.cc).
#pragma once

#include <mpi.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/simulate/simulation.h"

struct SimulatedRequest {
  bool done = false;
  char* data = nullptr;  // of a receive, or the result of a collective
  int64_t bytes = 0;
  int from = 0, tag = 0;  // of a receive
};

namespace hvd::sim {

struct Communicator {
  explicit Communicator(std::vector<int> of_job) : ranks(std::move(of_job)), calls(ranks.size()) {
    for (int r = 0; r < size(); ++r) numbers.emplace(ranks[r], r);
  }
  int rank() const { return rank_of(simulation->process().rank); }
  int rank_of(int of_job) const { return numbers.at(of_job); }
  int size() const { return static_cast<int>(ranks.size()); }

  std::vector<int> ranks;                // of the job
  std::vector<uint64_t> calls;           // by rank
  std::unordered_map<int, int> numbers;  // by rank of the job: its rank
  std::map<std::string, int> parts;      // communicators made of it
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
