// What the simulated processes share: MPI's messages between them, and each host's memory.
#pragma once

#include <cstdint>
#include <string>

#include "tests/simulate/simulation.h"

namespace hvd::sim {

// Of one rank; what an operation of MPI's own sends is computed from the usual algorithms.
struct Traffic {
  uint64_t messages = 0, bytes = 0;
};

struct Conditions {
  Nanoseconds latency = 50 * kMicrosecond;  // of most messages
  Nanoseconds most_late = 0;                // of one in fifty: up to so much more
  int64_t eager_bytes = 4096;        // MPI copies such messages; larger ones wait for the receiver
  int64_t shared_bytes = INT64_MAX;  // as many at once can a host's ranks get of /dev/shm
  int poor_host = -1;                // of this host alone; -1: of all
};

// What a process logs. Defined by the test.
void logged(const std::string& text);

// The bytes of /dev/shm that this host gives at once.
int64_t shared_bytes(int host);

// Begins a new job of these processes. What was there before is forgotten.
void new_network(const Conditions& conditions);

// No message passes between two hosts any more. MPI may notice.
void cut(int host, int other, bool noticed);

Traffic& traffic(int rank);

// Whether a rank has called MPI_Abort, or another one has and it has ended by that.
bool mpi_aborted();

}  // namespace hvd::sim
