#pragma once

#include <chrono>

namespace hvd {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

inline double seconds_since(Clock::time_point start) {
  return Seconds(Clock::now() - start).count();
}

}  // namespace hvd
