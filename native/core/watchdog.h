// For calls of MPI that wait for other ranks without a limit and cannot be left, as MPI_Init.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "core/settings.h"

namespace hvd {

// What a process ends with that has waited in vain: WAITED_IN_VAIN of hvd_keras/exit_codes.py.
constexpr int kWaitedInVain = 75;

class Watchdog {
 public:
  // While this lives: a warning after the time for one, and after `timeout` seconds (0: never) the
  // end of this process, with kWaitedInVain. `what` says who waits for what.
  Watchdog(const Settings& settings, double timeout, std::string what);
  ~Watchdog();

 private:
  void watch(double stall_warning_seconds, double timeout);
  // Until so many seconds have passed since the start; false if the call came back before.
  bool waits_for(double seconds);
  std::string text(double seconds) const;

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::thread thread_;
};

}  // namespace hvd
