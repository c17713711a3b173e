// How an engine ends: all ranks leave, or one aborts.

#include "core/engine/engine.h"
#include "core/request/collectives.h"

namespace hvd {

// One aborted set ends all of this process.
void Engine::check_other_sets() {
  if (const std::string why = history_.why_aborted(); !why.empty()) transport_->abort(why);
}

Status Engine::aborted(const Entry& entry, const Aborted& why) {
  history_.note_abort(why.what());
  history_.flight().alarm();
  if (entry.request.keep) entry.request.keep();
  return cannot_run(entry.request, Code::deadline_exceeded, why.what());
}

void Engine::stop(LeaveResult result, Code code, const std::string& why) {
  if (result == LeaveResult::aborted) history_.note_abort(why);
  if (result != LeaveResult::all_left) history_.flight().alarm();
  std::deque<Entry> left_over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    leave_result_ = result;
    code_ = code;
    why_stopped_ = why;
    left_over.swap(queue_);
  }
  changed_.notify_all();
  for (Entry& entry : left_over) finish(entry, cannot_run(entry.request, code, why));
}

void Engine::announce_leaving(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  leaving_ = true;
  queue_changed_ = Clock::now();
  reason_ = reason;
  changed_.notify_all();
}

Engine::LeaveResult Engine::leave(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto stopped = [this] { return stopped_; };
  if (seconds < 0) {
    changed_.wait(lock, stopped);
  } else {
    changed_.wait_for(lock, Seconds(seconds), stopped);
  }
  return leave_result_;
}

void Engine::close() {
  if (closed_.exchange(true)) return;
  thread_.join();
  while (submitting_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  transport_.reset();
}

}  // namespace hvd
