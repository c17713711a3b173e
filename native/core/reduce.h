// Element loops. Nothing here knows of ranks, messages or requests.
#pragma once

#include <cstdint>

#include "core/request.h"

namespace hvd {

// out[i] = scale(sources[0][i] ∘ sources[1][i] ∘ …), where ∘ is the reduction; the terms are
// combined in the order given, so that equal inputs give equal bits wherever it is computed.
//
// Each term is first multiplied by `prescale`; the result is divided by the number of sources if
// the reduction is the average, and multiplied by `postscale`. float16 and bfloat16 are accumulated
// in float32 and rounded once. Integers wrap around. For bool, min is `and` and max is `or`. `out`
// may be one of the sources.
void reduce(DType dtype, Reduction reduction, double prescale, double postscale,
            const void* const* sources, int count, int64_t elements, void* out);

// Fills with the value that leaves the others' as they are: 0 for sums, 1 for products, the
// greatest there is for min, the least for max.
void fill_neutral(DType dtype, Reduction reduction, int64_t elements, void* out);

// Of two vectors, accumulated in float64.
double dot(DType dtype, const void* a, const void* b, int64_t elements);

// a = weight_a * a + weight_b * b, in float64, rounded once.
void add_weighted(DType dtype, double weight_a, void* a, double weight_b, const void* b,
                  int64_t elements);

}  // namespace hvd
