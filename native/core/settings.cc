#include "core/settings.h"

#include <cmath>
#include <cstdlib>

namespace hvd {
namespace {

Status read_seconds(const char* name, double* value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  const double parsed = std::strtod(text, &end);
  if (*end != '\0' || !std::isfinite(parsed) || parsed < 0) {
    return Status::error(Code::invalid_argument,
                         std::string(name) + " is '" + text +
                             "', expected a number of seconds, 0 or more. Correct or unset it.");
  }
  *value = parsed;
  return {};
}

std::string read_text(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

}  // namespace

Status read_settings(Settings* settings) {
  settings->timeline = read_text("HVD_TIMELINE");
  settings->stats_directory = read_text("HVD_STATS_DIRECTORY");
  const Status status = read_seconds("HVD_STALL_WARNING_SECONDS", &settings->stall_warning_seconds);
  return status.ok() ? read_seconds("HVD_TIMEOUT_SECONDS", &settings->timeout_seconds) : status;
}

}  // namespace hvd
