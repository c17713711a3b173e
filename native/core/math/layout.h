// Which outputs a request needs, and which parts of its tensors go to which rank: for collectives
// whose outputs have another shape than their inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "core/request/request.h"

namespace hvd {

// Allocates the outputs of an allgather. `rows` are the inputs' first dimensions, rank by rank;
// sets the bytes that each input has on each rank.
Status allocate_gathered(Request& request, const std::vector<int64_t>& rows, int size,
                         std::vector<std::vector<int64_t>>* bytes);

// The first row of a tensor that a rank gets of a reducescatter. The first ranks get one row more
// if the rows do not divide.
int64_t first_row(int64_t rows, int rank, int size);

// Allocates the outputs of a reducescatter.
Status allocate_scattered(Request& request, int rank, int size);

// Memory that is sent to a rank of the set or received from it. The k-th part that a rank sends to
// another is the k-th that the other receives from it.
struct Part {
  int rank;
  char* data;
  int64_t bytes;
};

// Allocates the outputs of an alltoall and sets what goes where. `splits` are those of all ranks:
// by rank, tensor, and the rank to which the rows go.
Status allocate_exchanged(Request& request, const std::vector<int64_t>& splits, int rank, int size,
                          std::vector<Part>* sent, std::vector<Part>* received);

// What a rank sends to itself.
void copy_own(const std::vector<Part>& sent, const std::vector<Part>& received, int rank);

// This rank's status, or an error if another rank has failed: a rank that cannot allocate its
// output must not leave the others waiting for its bytes. `failed` is 0 or 1, by rank of the set.
Status all_or_none(const Status& mine, const std::vector<int64_t>& failed,
                   const std::vector<int>& ranks, const Request& request);

}  // namespace hvd
