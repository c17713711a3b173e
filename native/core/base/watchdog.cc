#include "core/base/watchdog.h"

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "core/base/log.h"
#include "core/base/threads.h"

namespace hvd {

Watchdog::Watchdog(const Settings& settings, double timeout, std::string what)
    : what_(std::move(what)),
      thread_(new_thread("hvd watchdog", [this, warning = settings.stall_warning_seconds, timeout] {
        watch(warning, timeout);
      })) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::watch(double stall_warning_seconds, double timeout) {
  for (double at = stall_warning_seconds; at > 0 && (timeout == 0 || at < timeout); at *= 2) {
    if (!waits_for(at)) return;
    log(LogLevel::warning, no_progress(at, what_) + time_left(at, timeout));
  }
  if (timeout == 0 || !waits_for(timeout)) return;
  log(LogLevel::error, no_progress(timeout, what_));
  // Not exit(): MPI's exit handlers would wait for the other ranks again.
  _exit(kWaitedInVain);
}

bool Watchdog::waits_for(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto limit = start_ + Seconds(seconds);
  return !changed_.wait_until(lock, limit, [this] { return over_; });
}

std::string no_progress(double seconds, const std::string& why) {
  return "no progress for " + std::to_string(static_cast<int64_t>(seconds)) + " s: " + why;
}

std::string time_left(double seconds, double timeout) {
  if (timeout == 0) return "";
  return " (the job ends in " + std::to_string(static_cast<int64_t>(timeout - seconds)) + " s)";
}

}  // namespace hvd
