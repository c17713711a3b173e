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
  const bool warns = stall_warning_seconds > 0 && (timeout == 0 || stall_warning_seconds < timeout);
  if (warns && !waits_for(stall_warning_seconds)) return;
  if (warns) log(LogLevel::warning, text(stall_warning_seconds));
  if (timeout == 0 || !waits_for(timeout)) return;
  log(LogLevel::error, text(timeout));
  // Not exit(): MPI's exit handlers would wait for the other ranks again.
  _exit(kWaitedInVain);
}

bool Watchdog::waits_for(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto limit = start_ + std::chrono::duration<double>(seconds);
  return !changed_.wait_until(lock, limit, [this] { return over_; });
}

std::string Watchdog::text(double seconds) const {
  return "no progress for " + std::to_string(static_cast<int64_t>(seconds)) + " s: " + what_;
}

}  // namespace hvd
