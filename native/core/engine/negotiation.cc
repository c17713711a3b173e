// The part of the engine for when the ranks' next requests differ, and for waits that take long.
#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/base/watchdog.h"
#include "core/engine/engine.h"
#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// Ranks whose queues have no request in common report again after this time, or at the next
// request: short enough not to slow down a step, long enough to cost under 1 % of a core.
constexpr double kRetrySeconds = 0.01;

// The first requests of an engine, to which HVD_FIRST_TIMEOUT_SECONDS applies.
constexpr uint64_t kFirstRequests = 10;

// The request with which a rank that has joined takes part in a collective of the others: neutral
// values if the kind reduces, no rows if their number may differ by rank; results are discarded.
// `header` is of another rank's request, see collectives.h.
Request neutral_request(const std::string& header) {
  Request request = decode_header(header);
  const Collective& row = collective(request.kind);
  const auto buffers = std::make_shared<std::deque<std::vector<char>>>();
  for (Input& input : request.inputs) {
    if (row.first_dim_free) input.shape[0] = 0;
    std::vector<char>& buffer = buffers->emplace_back(input.bytes());
    input.data = buffer.data();
    if (row.reduces)
      loops().fill_neutral(input.dtype, request.reduction, elements(input.shape), buffer.data());
    if (row.keeps_shape) request.outputs.push_back(buffer.data());
  }
  request.allocate = [buffers, inputs = request.inputs](size_t index, const Shape& shape,
                                                        void** data) {
    const size_t bytes = elements(shape) * size_of(inputs[index].dtype);
    *data = buffers->emplace_back(bytes).data();
    return Status();
  };
  request.done = [buffers](const Status&) {};
  return request;
}

}  // namespace

bool Engine::negotiate() {
  const double idle = idle_seconds();
  const Report mine = report(idle);
  std::vector<Report> reports = share(brief(mine));
  Decision decision = decide(reports);
  if (needs_texts(decision, reports)) {
    reports = share(mine);
    decision = decide(reports);
  } else if (decision.some_joined) {
    share_headers(&decision);
  }
  if (logs(LogLevel::debug)) log(LogLevel::debug, "negotiates:" + summary(reports));
  if (!decision.refuse.empty() || !decision.mismatch.empty()) history_.flight().alarm();
  for (const Refusal& refusal : decision.refuse) {
    note_progress();
    Entry entry;
    if (take(refusal.identity, &entry)) finish(entry, Status::error(refusal.code, refusal.message));
    history_.free();
  }
  for (const Step& step : decision.run) {
    Entry entry;
    if (!take(step.identity, &entry)) entry.request = neutral_request(step.header);
    serve(std::move(entry));
  }
  if (!decision.mismatch.empty()) {
    note_progress();
    fail_first(reports[transport_->rank()].queue.size(),
               Status::error(Code::failed_precondition, decision.mismatch));
    joined_.assign(joined_.size(), false);
    return true;
  }
  if (!decision.left.empty()) {
    const bool leaving = reports[transport_->rank()].leaving;
    stop(leaving ? LeaveResult::left_early : LeaveResult::peer_left, Code::aborted, decision.left);
    return false;
  }
  if (!decision.stuck.empty()) {
    stop(LeaveResult::aborted, Code::deadline_exceeded, decision.stuck);
    return false;
  }
  std::vector<bool> joined;
  for (const Report& report : reports) joined.push_back(report.joined());
  note_joined(joined);
  if (!decision.nothing()) return true;
  if (!idle_since_) idle_since_ = Clock::now();
  watch(idle, [&] { return "the ranks wait for different collectives:" + summary(reports); });
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t known = queue_.size();
  changed_.wait_for(lock, Seconds(kRetrySeconds), [&] {
    return queue_.size() != known || (leaving_ && !reports[transport_->rank()].leaving);
  });
  return true;
}

// What all ranks send in a negotiation.
std::vector<std::string> Engine::share_texts(const std::string& mine) {
  return transport_->gather(
      mine, [&](double seconds, const std::vector<int>& missing) -> std::string {
        return watch(seconds,
                     [&] { return who(missing) + " does not take part in a negotiation."; });
      });
}

std::vector<Report> Engine::share(const Report& mine) {
  std::vector<Report> reports;
  for (const std::string& bytes : share_texts(encode(mine))) reports.push_back(decode(bytes));
  return reports;
}

// Gives ranks that have joined the headers of what runs: each from the first rank that has it.
void Engine::share_headers(Decision* decision) {
  Writer mine;
  for (const Step& step : decision->run) {
    if (step.owner != transport_->rank()) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    mine(encode_header(find(step.identity)->request));
  }
  const std::vector<std::string> texts = share_texts(mine.take());
  std::vector<Reader> readers(texts.begin(), texts.end());
  for (Step& step : decision->run) readers[step.owner](step.header);
}

// Requests that came after the last report are not among them.
void Engine::fail_first(size_t count, const Status& status) {
  std::vector<Entry> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(count);
    std::move(queue_.begin(), end, std::back_inserter(failed));
    queue_.erase(queue_.begin(), end);
  }
  for (Entry& entry : failed) finish(entry, cannot_run(entry.request, status.code, status.message));
  history_.free();
}

// The first request of this identity, which may be brief.
std::deque<Engine::Entry>::iterator Engine::find(const std::string& name) {
  return std::find_if(queue_.begin(), queue_.end(), [&](const Entry& pending) {
    const std::string own = identity(pending.request);
    return own == name || brief_identity(own) == name;
  });
}

bool Engine::take(const std::string& name, Entry* entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = find(name);
  if (found == queue_.end()) return false;
  *entry = std::move(*found);
  queue_.erase(found);
  return true;
}

Report Engine::report(double idle) {
  std::lock_guard<std::mutex> lock(mutex_);
  Report report;
  report.rank = ranks()[transport_->rank()];
  report.host = transport_->host(transport_->rank());
  for (const Entry& entry : queue_) {
    const Collective& row = collective(entry.request.kind);
    Pending pending;
    pending.identity = identity(entry.request);
    pending.signature = describe(entry.request);
    pending.problem = entry.problem;
    pending.header = encode_header(entry.request);
    pending.joins = row.joins;
    pending.failed = entry.request.step_failed && *entry.request.step_failed;
    if (row.has_root) pending.needs = entry.request.root;
    if (row.needs_all) pending.needs = Pending::everybody;
    report.queue.push_back(std::move(pending));
  }
  report.leaving = leaving_;
  report.reason = reason_;
  const double unchanged = seconds_since(std::max(queue_changed_, last_progress_));
  if (settings_.mismatch_seconds > 0 && unchanged >= settings_.mismatch_seconds)
    report.unchanged = unchanged;
  if (timeout() > 0 && idle >= timeout()) report.waited = idle;
  report.warns = logs(LogLevel::debug) || (next_warning_ > 0 && idle >= next_warning_);
  return report;
}

// Of the ranks that have joined since the last negotiation, the highest counts as the last.
void Engine::note_joined(const std::vector<bool>& joined) {
  for (size_t r = 0; r < joined.size(); ++r) {
    if (joined[r] && !joined_[r]) last_joined_ = ranks()[r];
  }
  joined_ = joined;
}

// The last request of all ranks is a join.
void Engine::end_joining(Request& request) {
  note_joined(std::vector<bool>(joined_.size(), true));
  request.root = last_joined_;
  joined_.assign(joined_.size(), false);
}

std::string Engine::head_waits_for(const std::vector<int>& missing) {
  std::string head;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    head = identity(queue_.front().request);
  }
  return "rank " + std::to_string(ranks()[transport_->rank()]) + " waits for " + head + ", which " +
         who(missing) +
         " has not submitted. Do all ranks take the same steps (the same number of batches, the "
         "same branches)?";
}

// Names ranks and their hosts.
std::string Engine::who(const std::vector<int>& missing) const {
  std::string text;
  for (int rank : missing) {
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (on " +
            transport_->host(transport_->number_in_set(rank)) + ")";
  }
  return text.empty() ? "at least one other rank" : text;
}

void Engine::note_progress() {
  last_progress_ = Clock::now();
  idle_since_.reset();
  next_warning_ = settings_.stall_warning_seconds;
}

// Seconds since negotiations began to find nothing to run.
double Engine::idle_seconds() const { return idle_since_ ? seconds_since(*idle_since_) : 0; }

// Warns, again after twice the time, and returns the text if the deadline has passed. The text is
// made only if needed.
std::string Engine::watch(double seconds, const std::function<std::string()>& text) {
  if (const std::string why = history_.why_aborted(); !why.empty()) return why;
  const bool is_over = timeout() > 0 && seconds >= timeout();
  const bool warns = next_warning_ > 0 && seconds >= next_warning_;
  if (!is_over && !warns) return "";
  const std::string problem = no_progress(seconds, text());
  if (is_over) return problem;
  while (next_warning_ <= seconds) next_warning_ *= 2;
  log(LogLevel::warning, problem + time_left(seconds, timeout()));
  return "";
}

double Engine::timeout() const { return settings_.timeout(served_ < kFirstRequests); }

}  // namespace hvd
