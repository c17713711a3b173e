// Adasum (Maleki et al., 2020, https://arxiv.org/abs/2006.02924): adds gradients that point in
// different directions, averages those that point in the same. Combines each tensor of the ranks
// pairwise, neighbours first:
//
//   a, b ──> (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
//
// Each rank does so with one slice of every rank's tensors; only the dot products need all slices.
// Any number of ranks: one without a partner waits for the next level.
#include <functional>
#include <vector>

#include "core/cpu/kind_transport.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

// This rank's slice of one tensor of each rank, in rank order.
struct Slices {
  DType dtype;
  int64_t elements;
  std::vector<char> memory;
  std::vector<char*> of_rank;
};

// Combines the slices into the first rank's. `total` replaces numbers by their sums over all ranks.
void combine(std::vector<Slices>& tensors, const std::function<void(std::vector<double>&)>& total) {
  const size_t ranks = tensors.empty() ? 0 : tensors[0].of_rank.size();
  for (size_t stride = 1; stride < ranks; stride *= 2) {
    const auto each_pair = [&](const auto& visit) {
      size_t number = 0;
      for (Slices& tensor : tensors) {
        for (size_t r = 0; r + stride < ranks; r += 2 * stride)
          visit(tensor, tensor.of_rank[r], tensor.of_rank[r + stride], number++);
      }
    };
    std::vector<double> products;  // a·b, a·a, b·b
    each_pair([&](const Slices& tensor, const char* a, const char* b, size_t) {
      products.push_back(loops().dot(tensor.dtype, a, b, tensor.elements));
      products.push_back(loops().dot(tensor.dtype, a, a, tensor.elements));
      products.push_back(loops().dot(tensor.dtype, b, b, tensor.elements));
    });
    total(products);
    each_pair([&](const Slices& tensor, char* a, const char* b, size_t number) {
      const double* p = &products[3 * number];
      const auto weight = [&](double square) { return square > 0 ? 1 - p[0] / square / 2 : 1.0; };
      loops().add_weighted(tensor.dtype, weight(p[1]), a, weight(p[2]), b, tensor.elements);
    });
  }
}

}  // namespace

void KindTransport::adasum(Request& request) {
  const size_t n = request.inputs.size();
  const int size = this->size();
  // The first byte of a rank's slice of a tensor.
  const auto bound = [&](size_t i, int r) {
    const Input& input = request.inputs[i];
    return elements(input.shape) * r / size * size_of(input.dtype);
  };
  std::vector<Slices> tensors(n);
  std::vector<Part> sent, received;
  for (size_t i = 0; i < n; ++i) {
    const Input& input = request.inputs[i];
    char* whole = static_cast<char*>(request.outputs[i]);  // scaled here, sent from here
    loops().reduce(input.dtype, Reduction::sum, {request.prescale, 1, 1}, &input.data, 1,
                   elements(input.shape), whole);
    const int64_t mine = bound(i, rank() + 1) - bound(i, rank());
    Slices& tensor = tensors[i];
    tensor.dtype = input.dtype;
    tensor.elements = mine / size_of(input.dtype);
    tensor.memory.resize(mine * size);
    for (int r = 0; r < size; ++r) tensor.of_rank.push_back(tensor.memory.data() + r * mine);
    for (int k = 0; k < size; ++k) {  // each rank starts with a different peer
      const int r = (rank() + k) % size;
      sent.push_back({r, whole + bound(i, r), bound(i, r + 1) - bound(i, r)});
      received.push_back({r, tensor.of_rank[r], mine});
    }
  }
  exchange(sent, received);
  combine(tensors, [&](std::vector<double>& numbers) {
    const std::vector<double> all = share_numbers(numbers);
    for (size_t k = 0; k < numbers.size(); ++k) {
      numbers[k] = 0;
      for (int r = 0; r < size; ++r) numbers[k] += all[r * numbers.size() + k];
    }
  });
  for (size_t i = 0; i < n; ++i) {
    const Slices& tensor = tensors[i];
    const void* result = tensor.of_rank[0];
    loops().reduce(tensor.dtype, Reduction::sum, {1, 1, request.postscale}, &result, 1,
                   tensor.elements, tensor.of_rank[0]);
    std::vector<int64_t> sizes;
    for (int r = 0; r < size; ++r) sizes.push_back(bound(i, r + 1) - bound(i, r));
    gather_bytes(result, sizes, request.outputs[i]);
  }
}

}  // namespace hvd
