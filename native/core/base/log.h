// Log messages on stderr, in the format of hvd_keras/runtime/log.py:
// "hvd_keras WARNING rank 1: text".
#pragma once

#include <string>

namespace hvd {

enum class LogLevel { debug, info, warning, error };

// Prints messages of this level and above from now on, with this rank. Default: warnings, no rank.
void set_log(LogLevel level, int rank);

bool logs(LogLevel level);

// One write, so that lines of several ranks do not mix.
void log(LogLevel level, const std::string& text);

}  // namespace hvd
