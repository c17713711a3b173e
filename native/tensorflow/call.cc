#include "tensorflow/call.h"

#include <cstdlib>

namespace hvd {
namespace {

const std::map<std::string, Kind>& kinds() {
  static const std::map<std::string, Kind> kinds = {
      {"HvdAllreduce", Kind::allreduce},
      {"HvdAllgather", Kind::allgather},
      {"HvdBroadcast", Kind::broadcast},
      {"HvdAlltoall", Kind::alltoall},
      {"HvdReducescatter", Kind::reducescatter},
      {"HvdBarrier", Kind::barrier},
      {"HvdJoin", Kind::join},
  };
  return kinds;
}

const std::map<std::string, Reduction>& reductions() {
  static const std::map<std::string, Reduction> reductions = {
      {"Average", Reduction::average}, {"Sum", Reduction::sum},
      {"Min", Reduction::min},         {"Max", Reduction::max},
      {"Product", Reduction::product}, {"Adasum", Reduction::adasum},
  };
  return reductions;
}

const std::map<std::string, DType>& wires() {
  static const std::map<std::string, DType> wires = {
      {"float16", DType::float16}, {"bfloat16", DType::bfloat16}, {"float64", DType::float64}};
  return wires;
}

}  // namespace

Request request_of(const std::string& op, const Attributes& attributes) {
  const auto text = [&](const char* name) -> const std::string* {
    const auto found = attributes.texts.find(name);
    return found == attributes.texts.end() ? nullptr : &found->second;
  };
  Request request;
  request.kind = kinds().at(op);
  request.name = attributes.texts.at("tensor_name");
  request.process_set = static_cast<int>(attributes.numbers.at("process_set"));
  if (const auto* reduction = text("reduction")) request.reduction = reductions().at(*reduction);
  if (const auto* factor = text("prescale_factor"))
    request.prescale = std::strtod(factor->c_str(), nullptr);
  if (const auto* factor = text("postscale_factor"))
    request.postscale = std::strtod(factor->c_str(), nullptr);
  if (const auto* wire = text("wire_dtype")) request.wire = wires().at(*wire);
  if (const auto* note = text("note")) request.note = *note;
  const auto root = attributes.numbers.find("root_rank");
  if (root != attributes.numbers.end()) request.root = static_cast<int>(root->second);
  return request;
}

}  // namespace hvd
