// From an op's attributes to the request that its kernels submit. Knows no TensorFlow, for XLA's
// handlers need it too.
#pragma once

#include <map>
#include <string>

#include "core/request/collectives.h"
#include "core/request/request.h"

namespace hvd {

// By name; an op has only some.
struct Attributes {
  std::map<std::string, std::string> texts;
  std::map<std::string, int64_t> numbers;
};

// The op of a kind, in ops.cc: HvdAllreduce and so on.
std::string op_of(const Collective& collective);

// All but the tensors, of such an op.
Request request_of(const std::string& op, const Attributes& attributes);

}  // namespace hvd
