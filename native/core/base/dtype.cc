#include "core/base/dtype.h"

namespace hvd {
namespace {

#define HVD_SIZE(dtype, name, bytes, ...) bytes,
constexpr int64_t kSizes[] = {HVD_DTYPES(HVD_SIZE)};

#define HVD_NAME(dtype, name, ...) name,
constexpr const char* kNames[] = {HVD_DTYPES(HVD_NAME)};

constexpr const char* kReductions[] = {"Average", "Sum", "Min", "Max", "Product", "Adasum"};

}  // namespace

int64_t size_of(DType dtype) { return kSizes[static_cast<int>(dtype)]; }
const char* name_of(DType dtype) { return kNames[static_cast<int>(dtype)]; }
const char* name_of(Reduction reduction) { return kReductions[static_cast<int>(reduction)]; }
bool is_floating(DType dtype) { return dtype >= DType::float16; }

}  // namespace hvd
