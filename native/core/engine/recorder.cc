#include "core/engine/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/log.h"
#include "core/base/numbers.h"

namespace hvd {
namespace {

// Ranks that arrive within this time count as simultaneous: about what it takes to wake a thread.
constexpr uint64_t kTogetherNanoseconds = 100'000;

uint64_t nanoseconds(Clock::duration time) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()));
}

std::string seconds_text(uint64_t ns) { return decimal(ns / 1000, 6); }

}  // namespace

void Recorder::trace(int descriptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (trace_ >= 0) close(trace_);
  trace_ = descriptor;
}

void Recorder::note_end() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_ == Clock::time_point{}) ended_ = Clock::now();
}

void Recorder::note_abort(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_aborted_) why_aborted_ = why;
  is_aborted_ = true;
}

std::string Recorder::why_aborted() {
  if (!is_aborted_) return "";
  std::lock_guard<std::mutex> lock(mutex_);
  return why_aborted_;
}

std::string Recorder::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool over = ended_ != Clock::time_point{};
  const uint64_t duration = nanoseconds((over ? ended_ : Clock::now()) - begun_);
  std::string text = "{\"rank\": " + std::to_string(rank_) +
                     ", \"seconds\": " + seconds_text(duration) + ", \"collectives\": {";
  const char* comma = "";
  for (const auto& [kind, counted] : kinds_) {
    text += comma + ("\"" + kind) + "\": {\"requests\": " + std::to_string(counted.requests) +
            ", \"bytes\": " + std::to_string(counted.bytes) +
            ", \"waiting_seconds\": " + seconds_text(counted.waited_ns) +
            ", \"moving_seconds\": " + seconds_text(counted.ran_ns) + "}";
    comma = ", ";
  }
  text += "}, \"ranks\": [";
  comma = "";
  for (int r = 0; r < size_; ++r) {
    const Lateness& late = ranks_[r];
    text += comma + std::string("{\"last\": ") + std::to_string(late.times) +
            ", \"awaited_seconds\": " + seconds_text(late.ns) + "}";
    comma = ", ";
  }
  return text + "]}";
}

void Recorder::served(const std::string& kind, const std::string& name, const Served& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  Counters& counted = kinds_[kind];
  ++counted.requests;
  counted.bytes += event.bytes;
  counted.waited_ns += event.start_ns - event.ready_ns;
  counted.ran_ns += event.end_ns - event.start_ns;
  if (trace_ < 0) return;
  Served line = event;
  (kind + " " + name).copy(line.title, sizeof line.title);
  errno = ENOSPC;  // of a write that is not whole
  if (write(trace_, &line, sizeof line) == sizeof line) return;
  log(LogLevel::error, std::string("the timeline ends here: ") + std::strerror(errno));
  close(trace_);
  trace_ = -1;
}

void Recorder::agreed(const std::vector<int>& ranks, const Summary& agreement) {
  // The others waited for the last rank, on average this much longer.
  uint64_t longer = agreement.waited - agreement.waited_least * ranks.size();
  if (ranks.size() > 1) longer /= ranks.size() - 1;
  if (longer < kTogetherNanoseconds) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Lateness& late = ranks_[ranks[agreement.last]];
  ++late.times;
  late.ns += longer;
}

void History::served(const std::string& kind, const std::string& name, uint64_t bytes,
                     Clock::time_point submitted, Clock::time_point start) {
  const Clock::time_point ready = std::min(std::max(submitted, free_since_), start);
  free_since_ = Clock::now();
  const auto ns = [](Clock::time_point time) { return nanoseconds(time.time_since_epoch()); };
  const Served event{
      static_cast<uint64_t>(process_set_), ++turn_, ns(ready), ns(start), ns(free_since_), bytes};
  recorder_->served(kind, name, event);
  waited_ns_ += event.start_ns - event.ready_ns;
}

void History::agreed(const Summary& agreement) {
  recorder_->agreed(transport_.ranks(), agreement);
  waited_ns_ = 0;
}

}  // namespace hvd
