#include "core/engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "core/collectives.h"

namespace hvd {
namespace {

// The value that a leaving rank agrees on; fingerprint() never returns it.
constexpr uint64_t kLeaving = 1;

// Ranks that found nothing in common report again after this long at most, or when they get a new
// request: short enough not to be felt in a step, long enough to cost under 1 % of a core.
constexpr double kRetrySeconds = 0.01;

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, const Settings& settings)
    : transport_(std::move(transport)), settings_(settings), thread_([this] { loop(); }) {}

Engine::~Engine() { thread_.join(); }

void Engine::submit(Request request) {
  Status status = check(request, transport_->size());
  if (status.ok()) {
    const uint64_t print = fingerprint(request);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_) {
      queue_.push_back({std::move(request), print});
      changed_.notify_all();
      return;
    }
    status = Status::error(Code::aborted, identity(request) + " cannot run: " + why_stopped_);
  }
  request.done(status);
}

Engine::Farewell Engine::leave(const std::string& reason, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  leaving_ = true;
  reason_ = reason;
  changed_.notify_all();
  const auto stopped = [this] { return stopped_; };
  if (seconds < 0) {
    changed_.wait(lock, stopped);
  } else {
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), stopped);
  }
  return farewell_;
}

void Engine::loop() {
  while (true) {
    uint64_t head;
    std::string head_identity;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return leaving_ || !queue_.empty(); });
      head = queue_.empty() ? kLeaving : queue_.front().fingerprint;
      head_identity = queue_.empty() ? "the end of the job" : identity(queue_.front().request);
    }
    const bool equal = transport_->agree(head, [&](double seconds) {
      if (head == kLeaving) return;  // a rank may finish long after another
      warn_if_stalled(
          seconds,
          "rank " + std::to_string(transport_->rank()) + " waits for " + head_identity +
              ", which at least one other rank has not submitted. Do all ranks take the same "
              "steps (as many batches, the same branches)?");
    });
    if (!equal) {
      if (!negotiate()) return;
    } else if (head == kLeaving) {
      return stop(Farewell::together, "hvd.shutdown() was called. Call hvd.init() again first.");
    } else {
      serve(head_identity);
    }
  }
}

void Engine::serve(const std::string& name) {
  Entry entry = take(name);
  idle_seconds_ = 0;
  warned_ = false;
  const Status status = transport_->run(entry.request);
  entry.request.done(status);
}

bool Engine::negotiate() {
  const std::vector<std::string> encoded = transport_->gather(encode(report()));
  std::vector<Report> reports;
  for (const std::string& bytes : encoded) reports.push_back(decode(bytes));

  const Decision decision = decide(reports);
  for (const Refusal& refusal : decision.refuse) {
    take(refusal.identity).request.done(Status::error(Code::failed_precondition, refusal.message));
  }
  for (const std::string& name : decision.run) serve(name);
  if (!decision.left.empty()) {
    const bool leaving = reports[transport_->rank()].leaving;
    stop(leaving ? Farewell::alone : Farewell::deserted, decision.left);
    return false;
  }
  if (!decision.nothing()) return true;
  warn_if_stalled(idle_seconds_, "the ranks wait for different collectives:" + summary(reports));
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t known = queue_.size();
  changed_.wait_for(lock, std::chrono::duration<double>(kRetrySeconds), [&] {
    return queue_.size() != known || (leaving_ && !reports[transport_->rank()].leaving);
  });
  idle_seconds_ += kRetrySeconds;
  return true;
}

void Engine::stop(Farewell farewell, const std::string& why) {
  std::deque<Entry> left_over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    farewell_ = farewell;
    why_stopped_ = why;
    left_over.swap(queue_);
  }
  changed_.notify_all();
  for (Entry& entry : left_over) {
    entry.request.done(
        Status::error(Code::aborted, identity(entry.request) + " cannot run: " + why));
  }
}

Engine::Entry Engine::take(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(), [&](const Entry& entry) {
    return identity(entry.request) == name;
  });
  Entry entry =
      std::move(*found);  // it was reported from this queue, which only this thread shortens
  queue_.erase(found);
  return entry;
}

Report Engine::report() {
  std::lock_guard<std::mutex> lock(mutex_);
  Report report;
  for (const Entry& entry : queue_)
    report.queue.push_back({identity(entry.request), describe(entry.request)});
  report.leaving = leaving_;
  report.reason = reason_;
  return report;
}

void Engine::warn_if_stalled(double seconds, const std::string& text) {
  if (warned_ || settings_.stall_warning_seconds == 0 || seconds < settings_.stall_warning_seconds)
    return;
  warned_ = true;
  std::fprintf(stderr, "hvd_keras: no progress for %.0f s: %s\n", seconds, text.c_str());
}

}  // namespace hvd
