#include "core/adasum.h"

#include "core/reduce.h"

namespace hvd {

void combine_adasum(std::vector<AdasumTensor>& tensors,
                    const std::function<void(std::vector<double>&)>& total) {
  const size_t ranks = tensors.empty() ? 0 : tensors[0].slices.size();
  for (size_t stride = 1; stride < ranks; stride *= 2) {
    const auto each_pair = [&](const auto& visit) {
      size_t number = 0;
      for (AdasumTensor& tensor : tensors) {
        for (size_t r = 0; r + stride < ranks; r += 2 * stride)
          visit(tensor, tensor.slices[r], tensor.slices[r + stride], number++);
      }
    };
    std::vector<double> products;  // a·b, a·a, b·b
    each_pair([&](const AdasumTensor& tensor, const char* a, const char* b, size_t) {
      products.push_back(dot(tensor.dtype, a, b, tensor.elements));
      products.push_back(dot(tensor.dtype, a, a, tensor.elements));
      products.push_back(dot(tensor.dtype, b, b, tensor.elements));
    });
    total(products);
    each_pair([&](const AdasumTensor& tensor, char* a, const char* b, size_t number) {
      const double* p = &products[3 * number];
      const auto weight = [&](double square) { return square > 0 ? 1 - p[0] / square / 2 : 1.0; };
      add_weighted(tensor.dtype, weight(p[1]), a, weight(p[2]), b, tensor.elements);
    });
  }
}

}  // namespace hvd
