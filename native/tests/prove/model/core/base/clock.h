// A clock by which a millisecond has passed: a rank looks once and then sleeps, but has not waited
// long for another one.
#pragma once

namespace hvd {

struct Clock {
  struct time_point {};
  static time_point now() { return {}; }
};

constexpr double kStoppedSeconds = 0.5;

inline double seconds_since(Clock::time_point) { return 1e-3; }

}  // namespace hvd
