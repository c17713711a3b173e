// The request with which a rank that has joined takes part in a collective of the others.
#pragma once

#include <string>

#include "core/request/request.h"

namespace hvd {

// Neutral values if the kind reduces, no rows if their number may differ by rank; results are
// discarded. `header` is of another rank's request, see collectives.h.
Request neutral_request(const std::string& header);

}  // namespace hvd
