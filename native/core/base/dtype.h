// Dtypes of tensors, and reductions.
#pragma once

#include <cstdint>
#include <string>

namespace hvd {

// dtype, name, bytes, type in the loops (math/half.h), name in TensorFlow's DataType, in XLA's
// PrimitiveType, number in NCCL's ncclDataType_t (-1: it cannot compute with it).
#define HVD_DTYPES(row)                                                                         \
  row(boolean, "bool", 1, bool, BOOL, PRED, 1) row(uint8, "uint8", 1, uint8_t, UINT8, U8, 1)    \
      row(int8, "int8", 1, int8_t, INT8, S8, 0)                                                 \
          row(uint16, "uint16", 2, uint16_t, UINT16, U16, -1)                                   \
              row(int16, "int16", 2, int16_t, INT16, S16, -1)                                   \
                  row(uint32, "uint32", 4, uint32_t, UINT32, U32, 3)                            \
                      row(int32, "int32", 4, int32_t, INT32, S32, 2)                            \
                          row(uint64, "uint64", 8, uint64_t, UINT64, U64, 5)                    \
                              row(int64, "int64", 8, int64_t, INT64, S64, 4)                    \
                                  row(float16, "float16", 2, Float16, HALF, F16, 6)             \
                                      row(bfloat16, "bfloat16", 2, BFloat16, BFLOAT16, BF16, 9) \
                                          row(float32, "float32", 4, float, FLOAT, F32, 7)      \
                                              row(float64, "float64", 8, double, DOUBLE, F64, 8)

#define HVD_ROW(dtype, ...) dtype,
enum class DType : uint8_t { HVD_DTYPES(HVD_ROW) };
#undef HVD_ROW

constexpr int64_t kWidest = 8;  // bytes of the widest dtype

enum class Reduction : uint8_t { average, sum, min, max, product, adasum };

// Bytes of an element.
constexpr int64_t size_of(DType dtype) {
#define HVD_SIZE(dtype, name, bytes, ...) bytes,
  constexpr int64_t kSizes[] = {HVD_DTYPES(HVD_SIZE)};
#undef HVD_SIZE
  return kSizes[static_cast<int>(dtype)];
}

constexpr const char* name_of(DType dtype) {
#define HVD_NAME(dtype, name, ...) name,
  constexpr const char* kNames[] = {HVD_DTYPES(HVD_NAME)};
#undef HVD_NAME
  return kNames[static_cast<int>(dtype)];
}

constexpr const char* name_of(Reduction reduction) {
  constexpr const char* kNames[] = {"Average", "Sum", "Min", "Max", "Product", "Adasum"};
  return kNames[static_cast<int>(reduction)];
}

// Sets one of such values, up to the last, to that of a name, if there is one.
template <typename Value>
void set_by_name(const std::string& name, Value last, Value* value) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (name == name_of(static_cast<Value>(i))) *value = static_cast<Value>(i);
  }
}

constexpr bool is_floating(DType dtype) { return dtype >= DType::float16; }

}  // namespace hvd
