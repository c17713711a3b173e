// What the kernels for TensorFlow and for XLA exchange with it: attributes of ops, and statuses.
#pragma once

#include "absl/status/status.h"
#include "core/base/status.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/request_from_attributes.h"

namespace hvd {

inline Attributes attributes_of(const tensorflow::NodeDef& node) {
  Attributes attributes;
  for (const auto& [name, value] : node.attr()) {
    if (name[0] == '_') continue;  // TensorFlow's own
    if (value.value_case() == tensorflow::AttrValue::kS) attributes.texts[name] = value.s();
    if (value.value_case() == tensorflow::AttrValue::kI) attributes.numbers[name] = value.i();
  }
  return attributes;
}

inline absl::Status to_absl(const Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code), status.message);
}

}  // namespace hvd
