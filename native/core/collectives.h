// The table of collectives: what the ranks must agree on for each kind, and which inputs it takes.
// A new collective is one row here (and the code that moves its bytes in the transports).
#pragma once

#include <cstdint>
#include <string>

#include "core/request.h"

namespace hvd {

struct Collective {
  const char* name;
  bool reduces;         // reduction and scale factors count
  bool has_root;        // the root rank counts
  bool first_dim_free;  // the inputs' first dimensions may differ by rank
  bool keeps_shape;     // the output has the input's shape
};

const Collective& collective(Kind kind);
const char* name_of(Reduction reduction);

// An error if no rank could run this request in a world of `size` ranks.
Status check(const Request& request, int size);

// Two requests with one identity are the same step of the program.
std::string identity(const Request& request);

// All that ranks must agree on, in words: equal texts can run together.
std::string describe(const Request& request);

// A 64-bit hash of the same; never 0 or 1.
uint64_t fingerprint(const Request& request);

}  // namespace hvd
