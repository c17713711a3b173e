// A deadline for MPI calls that wait for other ranks and cannot be interrupted, such as MPI_Init.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "core/base/clock.h"
#include "core/base/settings.h"

namespace hvd {

// Exit status of a process whose wait timed out: WAITED_IN_VAIN of runtime/settings.py.
constexpr int kWaitedInVain = 75;

// The text of a warning or an error: for how long nothing has happened, and why.
std::string no_progress(double seconds, const std::string& why);

// What a warning adds: when the job will end, if nothing happens.
std::string time_left(double seconds, double timeout);

class Watchdog {
 public:
  // While this object lives: warns after settings.stall_warning_seconds, again after twice the
  // time, and ends this process with kWaitedInVain after `timeout` seconds (0: never). `what` says
  // who waits for what.
  Watchdog(const Settings& settings, double timeout, std::string what);
  ~Watchdog();

 private:
  void watch(double stall_warning_seconds, double timeout);
  // Waits until `seconds` have passed since the start; false if the guarded call returned before.
  bool waits_for(double seconds);

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  const Clock::time_point start_ = Clock::now();
  std::thread thread_;
};

}  // namespace hvd
