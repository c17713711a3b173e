// The table of collectives: what the ranks must agree on for each kind, and which arguments its op
// has. CONTRIBUTING.md lists what else a new collective needs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/export.h"
#include "core/request/request.h"

namespace hvd {

struct Collective {
  Kind kind;
  const char* name;     // in lower case; the op is HvdName
  bool reduces;         // reduction and scale factors count
  bool has_root;        // the root rank counts
  bool first_dim_free;  // the inputs' first dimensions may differ by rank
  bool keeps_shape;     // the output has the input's shape
  bool joins;           // the rank submits nothing more, but takes part with neutral values
  bool needs_all;       // cannot run when a rank has joined
  bool xla;             // XLA can compile it
  std::vector<const char*> on_host;  // the op's arguments that are never on a GPU
};

// In the order of Kind. (HVD_EXPORT: for the kernels.)
HVD_EXPORT const std::vector<Collective>& collectives();
HVD_EXPORT const Collective& collective(Kind kind);

// Returns why this request cannot run among these ranks of the job, or "".
std::string problem(const Request& request, const std::vector<int>& ranks);

// The dtype in which the request sends tensors of a dtype.
DType on_the_wire(const Request& request, DType dtype);

// Kind and name. Requests of equal identity on different ranks belong together.
std::string identity(const Request& request);

// The error of a request that does not run.
Status cannot_run(const Request& request, Code code, const std::string& why);

// All that ranks must agree on, as text: requests with equal texts can run together.
std::string describe(const Request& request);

// A 64-bit hash of the same, and of the request's problem; never 0 or 1.
uint64_t fingerprint(const Request& request, const std::string& problem);

// Everything about a request but its tensors' values: for a rank that will not submit it itself,
// and for XLA's programs.
HVD_EXPORT std::string encode_header(const Request& request);
HVD_EXPORT Request decode_header(const std::string& bytes);

}  // namespace hvd
