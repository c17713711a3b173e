#include "core/engine/engine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/log.h"
#include "core/engine/neutral_request.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// The value that a leaving rank agrees on; fingerprint() never returns it.
constexpr uint64_t kLeaving = 1;

// Ranks that found nothing in common report again after this long at most, or when they get a new
// request: short enough not to be felt in a step, long enough to cost under 1 % of a core.
constexpr double kRetrySeconds = 0.01;

// While the queue is empty, how often to ask a transport whether what it has begun goes well.
constexpr double kLookSeconds = 0.1;

// Until so many have been served, requests count as the first ones, see Settings.
constexpr uint64_t kFirstRequests = 10;

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, const Settings& settings,
               std::shared_ptr<Recorder> recorder, int process_set)
    : transport_(std::move(transport)),
      settings_(settings),
      history_(std::move(recorder), process_set, *transport_),
      joined_(transport_->ranks().size(), false),
      thread_([this] { loop(); }) {}

Engine::~Engine() { thread_.join(); }

void Engine::submit(Request request) {
  std::string wrong = problem(request, ranks());
  if (wrong.empty()) wrong = transport_->prepare(request);
  const uint64_t print = fingerprint(request, wrong);
  Status status;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_) {
      queue_changed_ = Clock::now();
      queue_.push_back({std::move(request), print, wrong, queue_changed_});
      changed_.notify_all();
      return;
    }
    status = Status::error(code_, identity(request) + " cannot run: " + why_stopped_);
  }
  request.done(status);
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
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), stopped);
  }
  return leave_result_;
}

void Engine::loop() try {
  while (true) {
    uint64_t head;
    std::string head_identity;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto called = [this] { return leaving_ || !queue_.empty(); };
      while (!called()) {
        lock.unlock();
        const bool busy = transport_->busy();
        lock.lock();
        if (!busy) changed_.wait(lock, called);
        if (busy) changed_.wait_for(lock, std::chrono::duration<double>(kLookSeconds), called);
      }
      head = queue_.empty() ? kLeaving : queue_.front().fingerprint;
      head_identity = queue_.empty() ? "the end of the job" : identity(queue_.front().request);
    }
    const std::vector<Proposal> proposals = transport_->agree(
        {head, history_.wait_times()},
        [&](double seconds, const std::vector<int>& missing) -> std::string {
          if (head == kLeaving) return "";  // a rank may finish long after another
          return watch(seconds, [&] {
            return "rank " + std::to_string(ranks()[transport_->rank()]) + " waits for " +
                   head_identity + ", which " + who(missing) +
                   " has not submitted. Do all ranks take the same steps (as many batches, the "
                   "same branches)?";
          });
        });
    history_.agreed(proposals);
    const bool equal =
        std::all_of(proposals.begin(), proposals.end(),
                    [&](const Proposal& proposal) { return proposal.fingerprint == head; });
    if (!equal) {
      if (!negotiate()) return;
    } else if (head == kLeaving) {
      return stop(LeaveResult::together, Code::aborted,
                  "hvd.shutdown() was called. Call hvd.init() again first.");
    } else {
      serve(head_identity, "");
    }
  }
} catch (const Aborted& aborted) {
  stop(LeaveResult::lost, Code::deadline_exceeded, aborted.what());
}

void Engine::serve(const std::string& name, const std::string& header) {
  note_progress();
  Entry entry;
  if (!take(name, &entry)) entry.request = neutral_request(header);
  uint64_t bytes = 0;
  for (const Input& input : entry.request.inputs)
    bytes += elements(input.shape) * size_of(on_the_wire(entry.request, input.dtype));
  Status status = Status::error(Code::invalid_argument, name + ": " + entry.problem);
  if (entry.problem.empty()) {
    if (collective(entry.request.kind).joins) {
      note_joined(std::vector<bool>(joined_.size(), true));
      entry.request.root = last_joined_;
      joined_.assign(joined_.size(), false);
    }
    const auto start = Clock::now();
    try {
      status = transport_->run(
          entry.request, [&](double seconds, const std::vector<int>& missing) -> std::string {
            return watch(seconds, [&] {
              return who(missing) + " does not go on in the midst of " + name + ".";
            });
          });
    } catch (const Aborted& aborted) {
      entry.request.done(
          Status::error(Code::deadline_exceeded, name + " cannot run: " + aborted.what()));
      throw;
    }
    history_.served(collective(entry.request.kind).name, entry.request.name, bytes, entry.submitted,
                    start);
  }
  ++served_;
  entry.request.done(status);
}

bool Engine::negotiate() {
  const std::vector<std::string> encoded = transport_->gather(
      encode(report()), [&](double seconds, const std::vector<int>& missing) -> std::string {
        return watch(seconds,
                     [&] { return who(missing) + " does not take part in a negotiation."; });
      });
  std::vector<Report> reports;
  for (const std::string& bytes : encoded) reports.push_back(decode(bytes));

  const Decision decision = decide(reports);
  if (logs(LogLevel::debug)) log(LogLevel::debug, "negotiates:" + summary(reports));
  for (const Refusal& refusal : decision.refuse) {
    note_progress();
    Entry entry;
    if (take(refusal.identity, &entry))
      entry.request.done(Status::error(refusal.code, refusal.message));
    history_.free();
  }
  for (const Step& step : decision.run) serve(step.identity, step.header);
  if (!decision.mismatch.empty()) {
    note_progress();
    fail_first(reports[transport_->rank()].queue.size(),
               Status::error(Code::failed_precondition, decision.mismatch));
    joined_.assign(joined_.size(), false);
    return true;
  }
  if (!decision.left.empty()) {
    const bool leaving = reports[transport_->rank()].leaving;
    stop(leaving ? LeaveResult::alone : LeaveResult::deserted, Code::aborted, decision.left);
    return false;
  }
  if (!decision.stuck.empty()) {
    stop(LeaveResult::lost, Code::deadline_exceeded, decision.stuck);
    return false;
  }
  std::vector<bool> joined;
  for (const Report& report : reports) joined.push_back(report.joined());
  note_joined(joined);
  if (!decision.nothing()) return true;
  if (!idle_since_) idle_since_ = Clock::now();
  watch(idle_seconds(),
        [&] { return "the ranks wait for different collectives:" + summary(reports); });
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t known = queue_.size();
  changed_.wait_for(lock, std::chrono::duration<double>(kRetrySeconds), [&] {
    return queue_.size() != known || (leaving_ && !reports[transport_->rank()].leaving);
  });
  return true;
}

void Engine::stop(LeaveResult result, Code code, const std::string& why) {
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
  for (Entry& entry : left_over)
    entry.request.done(Status::error(code, identity(entry.request) + " cannot run: " + why));
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
  for (Entry& entry : failed) {
    entry.request.done(
        Status::error(status.code, identity(entry.request) + " cannot run: " + status.message));
  }
  history_.free();
}

bool Engine::take(const std::string& name, Entry* entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(), [&](const Entry& pending) {
    return identity(pending.request) == name;
  });
  if (found == queue_.end()) return false;
  *entry = std::move(*found);
  queue_.erase(found);
  return true;
}

Report Engine::report() {
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
    if (row.has_root) pending.needs = entry.request.root;
    if (row.needs_all) pending.needs = Pending::everybody;
    report.queue.push_back(std::move(pending));
  }
  report.leaving = leaving_;
  report.reason = reason_;
  const double unchanged =
      std::chrono::duration<double>(Clock::now() - std::max(queue_changed_, last_progress_))
          .count();
  if (settings_.mismatch_seconds > 0 && unchanged >= settings_.mismatch_seconds)
    report.unchanged = unchanged;
  if (timeout() > 0 && idle_seconds() >= timeout()) report.waited = idle_seconds();
  return report;
}

// Of those that have joined since the last negotiation, the highest rank counts as the last.
void Engine::note_joined(const std::vector<bool>& joined) {
  for (size_t r = 0; r < joined.size(); ++r) {
    if (joined[r] && !joined_[r]) last_joined_ = ranks()[r];
  }
  joined_ = joined;
}

// Ranks in words, with their hosts.
std::string Engine::who(const std::vector<int>& missing) const {
  std::string text;
  for (int rank : missing) {
    const auto place = std::find(ranks().begin(), ranks().end(), rank) - ranks().begin();
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (on " +
            transport_->host(static_cast<int>(place)) + ")";
  }
  return text.empty() ? "at least one other rank" : text;
}

void Engine::note_progress() {
  last_progress_ = Clock::now();
  idle_since_.reset();
  warned_ = false;
}

// Of negotiations that found nothing to do.
double Engine::idle_seconds() const {
  if (!idle_since_) return 0;
  return std::chrono::duration<double>(Clock::now() - *idle_since_).count();
}

// Warns once, and returns the text if the deadline has passed. The text is made only if needed.
template <typename Text>
std::string Engine::watch(double seconds, const Text& text) {
  if (!warned_ && settings_.stall_warning_seconds > 0 &&
      seconds >= settings_.stall_warning_seconds) {
    warned_ = true;
    log(LogLevel::warning,
        "no progress for " + std::to_string(static_cast<int64_t>(seconds)) + " s: " + text());
  }
  if (timeout() == 0 || seconds < timeout()) return "";
  return "no progress for " + std::to_string(static_cast<int64_t>(seconds)) + " s: " + text();
}

double Engine::timeout() const { return settings_.timeout(served_ < kFirstRequests); }

}  // namespace hvd
