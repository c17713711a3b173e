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

}  // namespace hvd
