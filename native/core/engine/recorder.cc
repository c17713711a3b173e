#include "core/engine/recorder.h"

#include <algorithm>
#include <cstdio>

#include "core/base/log.h"
#include "core/base/numbers.h"

namespace hvd {
namespace {

// Ranks that arrive within this time count as simultaneous: about what it takes to wake a thread.
constexpr uint64_t kTogetherNanoseconds = 100'000;

// The longest name in the timeline; longer ones are cut.
constexpr size_t kNameBytes = 256;

uint64_t nanoseconds(Clock::duration time) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()));
}

std::string seconds_text(uint64_t ns) { return decimal(ns / 1000, 6); }

// The length of the UTF-8 character that starts there; 0 if none does.
size_t character(const std::string& text, size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  const size_t size = byte < 0x80 ? 1 : byte < 0xc2 ? 0 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
  if (byte > 0xf4 || at + size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) return 0;
  }
  return size;
}

// As a JSON string; invalid UTF-8 is replaced, and long names are cut.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) {
    const size_t size = character(text, at);
    const auto byte = static_cast<unsigned char>(text[at]);
    if (at + size > kNameBytes) {
      out += "\\u2026";
      break;
    }
    if (size == 0) {
      out += "\\ufffd";
    } else if (byte == '"' || byte == '\\') {
      out += std::string("\\") + text[at];
    } else if (byte < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      out += escaped;
    } else {
      out.append(text, at, size);
    }
    at += std::max<size_t>(size, 1);
  }
  return out + "\"";
}

}  // namespace

Status Recorder::start_timeline(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_.is_open()) {
    return Status::error(Code::failed_precondition,
                         "a timeline is being written already. Call hvd.stop_timeline() first.");
  }
  rows_.clear();
  timeline_begun_ = Clock::now();
  const Status status = file_.open(path);
  if (!status.ok()) file_.close();
  return status;
}

void Recorder::stop_timeline() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_.is_open()) end_unless(file_.finish());
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
    text += comma + quoted(kind) + ": {\"requests\": " + std::to_string(counted.requests) +
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

void Recorder::served(const Served& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  Counters& counted = kinds_[request.kind];
  ++counted.requests;
  counted.bytes += request.bytes;
  counted.waited_ns += nanoseconds(request.start - request.ready);
  counted.ran_ns += nanoseconds(request.end - request.start);
}

void Recorder::agreed(int process_set, const std::vector<int>& ranks, const HostOf& host_of,
                      const std::vector<Served>& requests, const Agreement& agreement) {
  // The others waited for the last rank, on average this much longer.
  uint64_t longer = agreement.waited - agreement.waited_least * ranks.size();
  if (ranks.size() > 1) longer /= ranks.size() - 1;
  const int last = longer < kTogetherNanoseconds ? -1 : ranks[agreement.last];
  if (last < 0 && !draws()) return;

  std::lock_guard<std::mutex> lock(mutex_);
  if (last >= 0) {
    ++ranks_[last].times;
    ranks_[last].ns += longer;
  }
  if (file_.is_open() && !agreement.all_times.empty())
    draw(process_set, ranks, host_of, requests, agreement.all_times, last);
}

void Recorder::draw(int process_set, const std::vector<int>& ranks, const HostOf& host_of,
                    const std::vector<Served>& requests, const std::vector<WaitTimes>& all_times,
                    int last) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    begin_row(process_set, ranks[r], host_of(static_cast<int>(r)));
    for (const Served& request : requests) {
      if (request.end < timeline_begun_) continue;
      // After a negotiation several requests run in a row, and ranks report only the sums: then
      // this rank's own times are drawn for all.
      WaitTimes wait_times{nanoseconds(request.start - request.ready),
                           nanoseconds(request.end - request.start), request.bytes};
      if (requests.size() == 1) wait_times = all_times[r];
      const std::string arguments = "\"kind\":" + quoted(request.kind) +
                                    ",\"name\":" + quoted(request.name) +
                                    ",\"bytes\":" + std::to_string(wait_times.bytes) +
                                    ",\"process_set\":" + std::to_string(process_set) +
                                    ",\"last_rank\":" + (last < 0 ? "null" : std::to_string(last));
      const bool waits = last >= 0 && last != ranks[r];
      slice(process_set, ranks[r], waits ? "wait for rank " + std::to_string(last) : "wait",
            {request.start - std::chrono::nanoseconds(wait_times.waited_ns), request.start},
            arguments);
      slice(process_set, ranks[r], request.kind + " " + request.name,
            {request.start, request.start + std::chrono::nanoseconds(wait_times.ran_ns)},
            arguments);
    }
  }
  if (file_.is_open()) end_unless(file_.flush());
}

void Recorder::begin_row(int process_set, int rank, const std::string& host) {
  if (!rows_.emplace(std::make_pair(rank, process_set), timeline_begun_).second) return;
  const std::string where = ",\"pid\":" + std::to_string(rank) +
                            ",\"tid\":" + std::to_string(process_set) + ",\"args\":{";
  add("{\"ph\":\"M\",\"name\":\"process_name\"" + where +
      "\"name\":" + quoted("rank " + std::to_string(rank) + " on " + host) + "}}");
  add("{\"ph\":\"M\",\"name\":\"process_sort_index\"" + where +
      "\"sort_index\":" + std::to_string(rank) + "}}");
  add("{\"ph\":\"M\",\"name\":\"thread_name\"" + where + "\"name\":" +
      quoted(process_set == 0 ? "all ranks" : "process set " + std::to_string(process_set)) + "}}");
}

// Slices of one row must not overlap; those of other ranks could, slightly, since they are placed
// on this rank's clock.
void Recorder::slice(int process_set, int rank, const std::string& title, Span span,
                     const std::string& arguments) {
  Clock::time_point& drawn = rows_.at({rank, process_set});
  span.begin = std::max(span.begin, drawn);
  span.end = std::min(std::max(span.end, span.begin), std::max(Clock::now(), span.begin));
  drawn = span.end;
  add("{\"ph\":\"X\",\"name\":" + quoted(title) + ",\"pid\":" + std::to_string(rank) +
      ",\"tid\":" + std::to_string(process_set) +
      ",\"ts\":" + decimal(nanoseconds(span.begin - timeline_begun_), 3) + ",\"dur\":" +
      decimal(nanoseconds(span.end - span.begin), 3) + ",\"args\":{" + arguments + "}}");
}

void Recorder::add(const std::string& event) {
  if (file_.is_open()) file_.add(event);
}

// A timeline that cannot be written does not end the job.
void Recorder::end_unless(const Status& status) {
  if (status.ok()) return;
  log(LogLevel::error, "the timeline ends here: " + status.message);
  file_.close();
}

void History::served(const std::string& kind, const std::string& name, uint64_t bytes,
                     Clock::time_point submitted, Clock::time_point start) {
  const Served& request = since_.emplace_back(Served{
      kind, name, bytes, std::min(std::max(submitted, free_since_), start), start, Clock::now()});
  free_since_ = request.end;
  recorder_->served(request);
  past_.waited_ns += nanoseconds(request.start - request.ready);
  past_.ran_ns += nanoseconds(request.end - request.start);
  past_.bytes += bytes;
}

void History::agreed(const Agreement& agreement) {
  if (!since_.empty())
    recorder_->agreed(
        process_set_, transport_.ranks(), [this](int r) { return transport_.host(r); }, since_,
        agreement);
  past_ = {};
  since_.clear();
}

}  // namespace hvd
