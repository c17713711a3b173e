// From an op's attributes to the request that its kernels submit. Knows no TensorFlow, for XLA's
// handlers need it too.
#pragma once

#include <map>
#include <string>

#include "core/request.h"

namespace hvd {

// By name; an op has only some.
struct Attributes {
  std::map<std::string, std::string> texts;
  std::map<std::string, int64_t> numbers;
};

// All but the tensors, of an op in ops.cc.
Request request_of(const std::string& op, const Attributes& attributes);

}  // namespace hvd
