// The request with which a rank that has joined takes part in what the others submit.
#pragma once

#include <string>

#include "core/request/request.h"

namespace hvd {

// Neutral values where the ranks' values are reduced, no rows where their number is free; results
// are thrown away. `header` is of another rank's request, see collectives.h.
Request neutral_request(const std::string& header);

}  // namespace hvd
