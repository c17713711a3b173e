// From an op to the request that its kernels, or XLA's, submit.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "core/base/status.h"
#include "core/request/collectives.h"
#include "core/request/request.h"
#include "tensorflow/core/framework/node_def.pb.h"

namespace hvd {

// The op of a kind, in ops.cc: HvdAllreduce and so on.
std::string op_of(const Collective& collective);

// All but the tensors, of such an op.
Request request_of(const tensorflow::NodeDef& node);

absl::Status to_absl(const Status& status);

}  // namespace hvd
