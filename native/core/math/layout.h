// Which outputs a request needs, and which parts of its tensors go to which rank: for collectives
// whose outputs have another shape than their inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "core/request/request.h"
#include "core/request/transport.h"

namespace hvd {

// The first row of a tensor that a rank gets of a reducescatter. The first ranks get one row more
// if the rows do not divide.
int64_t first_row(int64_t rows, int rank, int size);

// The byte with which each rank's rows of a reducescatter begin, and the end of all.
std::vector<int64_t> scattered(const Input& input, int size);

// Memory that is sent to a rank of the set or received from it. The k-th part that a rank sends to
// another is the k-th that the other receives from it.
struct Part {
  int rank;
  char* data;
  int64_t bytes;
};

// What the ranks move for a request whose outputs have other shapes than its inputs.
struct Layout {
  std::vector<std::vector<int64_t>> gathered;  // allgather: bytes, by input and rank
  std::vector<Part> sent, received;            // alltoall
};

// Lays out an allgather, alltoall or reducescatter, and allocates its outputs. All ranks call it. A
// rank that cannot allocate its output must not leave the others waiting for its bytes, so its
// error is an error on all.
Status lay_out(Request& request, Transport& transport, const Waiting& waiting, Layout* layout);

// What a rank sends to itself.
void copy_own(const std::vector<Part>& sent, const std::vector<Part>& received, int rank);

}  // namespace hvd
