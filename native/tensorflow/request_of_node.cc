#include "tensorflow/request_of_node.h"

#include <cctype>

#include "core/base/numbers.h"
#include "tensorflow/core/framework/attr_value.pb.h"

namespace hvd {

std::string op_of(const Collective& collective) {
  std::string name = collective.name;
  name[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(name[0])));
  return "Hvd" + name;
}

Request request_of(const tensorflow::NodeDef& node) {
  // Of an attribute that this op lacks: empty, or 0.
  const auto attribute = [&](const char* name) {
    const auto found = node.attr().find(name);
    return found == node.attr().end() ? tensorflow::AttrValue() : found->second;
  };
  Request request;
  for (const Collective& row : collectives()) {
    if (op_of(row) == node.op()) request.kind = row.kind;
  }
  request.name = attribute("tensor_name").s();
  request.note = attribute("note").s();
  request.process_set = static_cast<int>(attribute("process_set").i());
  request.waits = node.attr().count("waits") == 0 || attribute("waits").b();
  request.root = static_cast<int>(attribute("root_rank").i());
  set_by_name(attribute("reduction").s(), Reduction::adasum, &request.reduction);
  set_by_name(attribute("wire_dtype").s(), DType::float64, &request.wire);
  const std::string prescale = attribute("prescale_factor").s();
  const std::string postscale = attribute("postscale_factor").s();
  if (!prescale.empty()) parse(prescale, &request.prescale);
  if (!postscale.empty()) parse(postscale, &request.postscale);
  return request;
}

absl::Status to_absl(const Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code), status.message);
}

}  // namespace hvd
