// Dtypes of tensors, and reductions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd {

enum class DType : uint8_t {
  boolean,
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
};

enum class Reduction : uint8_t { average, sum, min, max, product, adasum };

size_t size_of(DType dtype);  // bytes of an element
const char* name_of(DType dtype);
const char* name_of(Reduction reduction);
bool is_floating(DType dtype);

}  // namespace hvd
