// Adasum (Maleki et al., 2020, https://arxiv.org/abs/2006.02924): adds gradients that point in
// different directions, averages those that point in the same.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/math/layout.h"
#include "core/request/request.h"

namespace hvd {

// The communication that Adasum needs; all ranks make the same calls.
struct AdasumMoves {
  // Alltoall of parts, including those that a rank sends to itself.
  std::function<void(const std::vector<Part>& sent, const std::vector<Part>& received)> exchange;
  // Allgather of numbers, equally many from each rank.
  std::function<std::vector<double>(const std::vector<double>& mine)> numbers;
  // Allgather of bytes.
  std::function<void(const void* mine, const std::vector<int64_t>& sizes, void* all)> gather;
};

// Combines each tensor of the ranks pairwise, neighbours first:
//
//   a, b ──> (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
//
// Each rank does so with one slice of every rank's tensors; only the dot products need all slices.
// Any number of ranks: one without a partner waits for the next level.
void adasum(Request& request, int rank, int size, const AdasumMoves& moves);

}  // namespace hvd
