#include "core/base/dtype.h"

namespace hvd {
namespace {

struct DTypeRow {
  const char* name;
  size_t size;
};

constexpr DTypeRow kDTypes[] = {
    {"bool", 1},     {"uint8", 1},   {"int8", 1},    {"uint16", 2}, {"int16", 2},
    {"uint32", 4},   {"int32", 4},   {"uint64", 8},  {"int64", 8},  {"float16", 2},
    {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
};

constexpr const char* kReductions[] = {"Average", "Sum", "Min", "Max", "Product", "Adasum"};

}  // namespace

size_t size_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].size; }
const char* name_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }
const char* name_of(Reduction reduction) { return kReductions[static_cast<int>(reduction)]; }
bool is_floating(DType dtype) { return dtype >= DType::float16; }

}  // namespace hvd
