// What a rank that has joined gives in place of a request that it does not submit.
#pragma once

#include <string>

#include "core/request.h"

namespace hvd {

// Neutral values where the ranks' values are reduced, no rows where their number is free; results
// are thrown away. `header` is of another rank's request, see collectives.h.
Request stand_in(const std::string& header);

}  // namespace hvd
