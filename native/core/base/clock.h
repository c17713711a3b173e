#pragma once

#include <time.h>

#include <chrono>

namespace hvd {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// A thread that waits but takes no turn for so long was stopped. It does not blame the others for
// that: what they have sent may arrive now.
constexpr double kStoppedSeconds = 0.5;

inline double seconds_since(Clock::time_point start) {
  return Seconds(Clock::now() - start).count();
}

// That this thread has had a core.
inline double cpu_seconds() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace hvd
