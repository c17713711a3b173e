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
#include "core/engine/texts.h"
#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// Ranks whose queues have no request in common report again at the next request, or after as long
// as they have found nothing, within these limits: the first is short beside a step, the second
// costs under 1 % of a core.
constexpr double kLeastRetrySeconds = 50e-6, kMostRetrySeconds = 0.01;

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
  const Digest all = of_all(Digest(mine));
  Decision decision = decide(all);
  if (decision.needs_texts) explain(all, of_all(Texts(decision, all, mine)), &decision);
  if (logs(LogLevel::debug)) log(LogLevel::debug, "negotiates:" + decision.summary);
  if (!decision.refuse.empty() || !decision.mismatch.empty()) history_.flight().alarm();
  for (const Refusal& refusal : decision.refuse) {
    note_progress();
    Entry entry;
    if (take(refusal.identity, &entry))
      finish(entry, Status::error(refusal.code(), refusal.message));
    history_.free();
  }
  for (const Step& step : decision.run) {
    Entry entry;
    if (!take(step.identity, &entry)) entry.request = neutral_request(step.header);
    serve(std::move(entry));
  }
  if (!decision.mismatch.empty()) {
    note_progress();
    fail_first(mine.queue.size(), Status::error(Code::failed_precondition, decision.mismatch));
    nobody_has_joined();
    return true;
  }
  if (!decision.left.empty()) {
    stop(mine.leaving ? LeaveResult::left_early : LeaveResult::peer_left, Code::aborted,
         decision.left);
    return false;
  }
  if (!decision.stuck.empty()) {
    stop(LeaveResult::aborted, Code::deadline_exceeded, decision.stuck);
    return false;
  }
  // Of the ranks that have joined since the last negotiation, the highest counts as the last.
  if (all.newly_joined >= 0) last_joined_ = ranks()[all.newly_joined];
  has_joined_ = mine.joined();
  last_absent_ = all.absent;
  if (!decision.nothing()) return true;
  if (!idle_since_) idle_since_ = Clock::now();
  watch(idle, [&] { return "the ranks wait for different collectives:" + decision.summary; });
  const double retry = std::clamp(idle_seconds(), kLeastRetrySeconds, kMostRetrySeconds);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, Seconds(retry), [&] {
    return queue_.size() > mine.queue.size() || (leaving_ && !mine.leaving);
  });
  return true;
}

// What all ranks say together, of digests or texts.
template <typename T>
T Engine::of_all(const T& mine) {
  const auto combine = [](const std::string& some, const std::string& others) {
    T both = decode<T>(some);
    both.add(decode<T>(others));
    return encode(both);
  };
  return decode<T>(transport_->reduce(
      encode(mine), combine, [&](double seconds, const Missing& missing) -> std::string {
        return watch(seconds,
                     [&] { return who(missing()) + " does not take part in a negotiation."; });
      }));
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

// The first request of this identity.
bool Engine::take(uint64_t wanted, Entry* entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(), [&](const Entry& pending) {
    return hash_of(identity(pending.request)) == wanted;
  });
  if (found == queue_.end()) return false;
  *entry = std::move(*found);
  queue_.erase(found);
  return true;
}

Report Engine::report(double idle) {
  std::lock_guard<std::mutex> lock(mutex_);
  Report report;
  report.number = transport_->rank();
  report.rank = ranks()[report.number];
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
  report.had_joined = has_joined_;
  report.leaving = leaving_;
  report.reason = reason_;
  const double unchanged = seconds_since(std::max(queue_changed_, last_progress_));
  if (settings_.mismatch_seconds > 0 && unchanged >= settings_.mismatch_seconds)
    report.unchanged = unchanged;
  if (timeout() > 0 && idle >= timeout()) report.waited = idle;
  report.warns = logs(LogLevel::debug) || (next_warning_ > 0 && idle >= next_warning_);
  return report;
}

// The last request of all ranks is a join.
void Engine::end_joining(Request& request) {
  if (last_absent_ >= 0) last_joined_ = ranks()[last_absent_];
  request.root = last_joined_;
  nobody_has_joined();
}

void Engine::nobody_has_joined() {
  has_joined_ = false;
  last_absent_ = transport_->size() - 1;
}

std::string Engine::head_waits_for(const std::vector<int>& missing) {
  const std::string mine = "rank " + std::to_string(ranks()[transport_->rank()]);
  std::string head;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty()) return mine + " has " + reason_ + ", and waits for " + who(missing) + ".";
    head = identity(queue_.front().request);
  }
  return mine + " waits for " + head + ", which " + who(missing) +
         " has not submitted. Do all ranks take the same steps (the same number of batches, the "
         "same branches)?";
}

// Names ranks and their hosts.
std::string Engine::who(const std::vector<int>& missing) const {
  std::string text;
  if (missing.size() > kShownRanks) {
    Said::Group all;
    for (int rank : missing) all.add(rank, rank);
    return names(all) + " (the first on " +
           transport_->host(transport_->number_in_set(missing[0])) + ")";
  }
  for (int rank : missing) {
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (on " +
            transport_->host(transport_->number_in_set(rank)) + ")";
  }
  return text.empty() ? "at least one other rank" : text;
}

void Engine::note_progress(Clock::time_point now) {
  last_progress_ = now;
  idle_since_.reset();
  next_warning_ = settings_.stall_warning_seconds;
}

// Seconds since negotiations began to find nothing to run.
double Engine::idle_seconds() const { return idle_since_ ? seconds_since(*idle_since_) : 0; }

// Warns, again after twice the time, and returns the text if the deadline has passed. The text is
// made only if needed.
std::string Engine::watch(double seconds, const std::function<std::string()>& text,
                          bool has_deadline) {
  if (const std::string why = history_.why_aborted(); !why.empty()) return why;
  const double deadline = has_deadline ? timeout() : 0;
  const bool is_over = deadline > 0 && seconds >= deadline;
  const bool warns = next_warning_ > 0 && seconds >= next_warning_;
  if (!is_over && !warns) return "";
  const std::string problem = no_progress(seconds, text());
  if (is_over) return problem;
  while (next_warning_ <= seconds) next_warning_ *= 2;
  log(LogLevel::warning, problem + time_left(seconds, deadline));
  return "";
}

double Engine::timeout() const { return settings_.timeout(served_ < kFirstRequests); }

}  // namespace hvd
