#include "core/math/reduce.h"

namespace hvd {
namespace {

const Loops& fastest() {
  static const Loops fastest = loops().back();
  return fastest;
}

}  // namespace

void reduce(DType dtype, Reduction reduction, const Factors& factors, const void* const* sources,
            int count, int64_t elements, void* out) {
  fastest().reduce(dtype, reduction, factors, sources, count, elements, out);
}

void convert(DType from, const void* in, DType to, void* out, int64_t elements) {
  fastest().convert(from, in, to, out, elements);
}

void fill_neutral(DType dtype, Reduction reduction, int64_t elements, void* out) {
  fastest().fill_neutral(dtype, reduction, elements, out);
}

double dot(DType dtype, const void* a, const void* b, int64_t elements) {
  return fastest().dot(dtype, a, b, elements);
}

void add_weighted(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                  int64_t elements) {
  fastest().add_weighted(dtype, weight_a, a, weight_b, b, elements);
}

}  // namespace hvd
