#include "core/base/numbers.h"

#include <locale.h>

#include <cstdlib>

namespace hvd {

bool parse(const std::string& text, double* value) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  *value = strtod_l(text.c_str(), &end, c);
  return !text.empty() && end == text.c_str() + text.size();
}

std::string decimal(uint64_t value, int decimals) {
  std::string digits = std::to_string(value);
  if (const size_t least = decimals + 1; digits.size() < least)
    digits.insert(0, least - digits.size(), '0');
  return digits.insert(digits.size() - decimals, ".");
}

}  // namespace hvd
