// Numbers as text, whatever the process's locale: other libraries may have chosen one in which
// decimals have a comma.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/export.h"

namespace hvd {

// Whether all of the text is a number. (Not std::from_chars: GCC 10 has none for doubles.)
HVD_EXPORT bool parse(const std::string& text, double* value);

// value / 10^decimals.
std::string decimal(uint64_t value, int decimals);

}  // namespace hvd
