#include "tensorflow/request_from_attributes.h"

#include <cctype>

#include "core/base/numbers.h"

namespace hvd {
namespace {

const std::map<std::string, Kind>& kinds() {
  static const auto* kinds = [] {
    auto* by_op = new std::map<std::string, Kind>;
    for (const Collective& row : collectives()) by_op->emplace(op_of(row), row.kind);
    return by_op;
  }();
  return *kinds;
}

const std::map<std::string, Reduction>& reductions() {
  static const auto* reductions = new std::map<std::string, Reduction>{
      {"Average", Reduction::average}, {"Sum", Reduction::sum},
      {"Min", Reduction::min},         {"Max", Reduction::max},
      {"Product", Reduction::product}, {"Adasum", Reduction::adasum},
  };
  return *reductions;
}

const std::map<std::string, DType>& wires() {
  static const auto* wires = new std::map<std::string, DType>{
      {"float16", DType::float16}, {"bfloat16", DType::bfloat16}, {"float64", DType::float64}};
  return *wires;
}

}  // namespace

std::string op_of(const Collective& collective) {
  std::string name = collective.name;
  name[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(name[0])));
  return "Hvd" + name;
}

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
  if (const auto* factor = text("prescale_factor")) parse(*factor, &request.prescale);
  if (const auto* factor = text("postscale_factor")) parse(*factor, &request.postscale);
  if (const auto* wire = text("wire_dtype")) request.wire = wires().at(*wire);
  if (const auto* note = text("note")) request.note = *note;
  const auto root = attributes.numbers.find("root_rank");
  if (root != attributes.numbers.end()) request.root = static_cast<int>(root->second);
  return request;
}

}  // namespace hvd
