#include "core/base/log.h"

#include <unistd.h>

#include <atomic>

namespace hvd {
namespace {

std::atomic<LogLevel> lowest{LogLevel::warning};
std::atomic<int> own_rank{-1};

constexpr const char* kNames[] = {"DEBUG", "INFO", "WARNING", "ERROR"};

}  // namespace

void set_log(LogLevel level, int rank) {
  lowest = level;
  own_rank = rank;
}

bool logs(LogLevel level) { return level >= lowest; }

void log(LogLevel level, const std::string& text) {
  if (!logs(level)) return;
  std::string line = std::string("hvd_keras ") + kNames[static_cast<int>(level)];
  if (own_rank >= 0) line += " rank " + std::to_string(own_rank);
  line += ": " + text + "\n";
  // There is nowhere to report a failed write.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace hvd
