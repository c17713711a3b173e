// Adasum (Maleki et al., 2020, https://arxiv.org/abs/2006.02924): adds gradients that point in
// different directions, averages those that point in the same.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/request.h"

namespace hvd {

// This rank's slice of one tensor of each rank, in rank order.
struct AdasumTensor {
  DType dtype;
  int64_t elements;
  std::vector<char*> slices;
};

// Combines each tensor's slices pairwise, neighbours first, into its first slice:
//
//   a, b ──> (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
//
// `total` replaces numbers by their sums over all ranks, in rank order; it is called equally often
// on all. Any number of ranks: one without a partner waits for the next level.
void combine_adasum(std::vector<AdasumTensor>& tensors,
                    const std::function<void(std::vector<double>&)>& total);

}  // namespace hvd
