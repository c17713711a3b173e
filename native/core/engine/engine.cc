#include "core/engine/engine.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "core/base/threads.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// The value that a leaving rank agrees on; fingerprint() never returns it.
constexpr uint64_t kLeaving = 1;

// While the queue is empty, how often to ask the transport about work that it has started.
constexpr double kBusySeconds = 0.1;

// This thread is in submit() and calls done(), which may submit again: however often it does, it
// needs no more of the stack.
thread_local bool calls_done = false;

class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

// An error of this rank alone must not leave the others waiting.
template <typename Call>
void Engine::all_or_abort(const Call& call) try {
  call();
} catch (const Aborted&) {
  throw;
} catch (const std::exception& error) {
  const std::string why =
      "rank " + std::to_string(ranks_[transport_->rank()]) + " cannot go on: " + error.what() + ".";
  log(LogLevel::error, why);
  transport_->abort(why);
}

Engine::Engine(std::unique_ptr<Transport> transport, const Settings& settings,
               std::shared_ptr<Recorder> recorder, int process_set)
    : transport_(std::move(transport)),
      ranks_(transport_->ranks()),
      settings_(settings),
      history_(std::move(recorder), process_set, *transport_),
      thread_(new_thread("hvd set " + std::to_string(process_set), [this] { loop(); })) {}

void Engine::submit(Request request) {
  const Counted this_thread(submitting_);
  std::string wrong = request.problem.empty() ? problem(request, ranks()) : request.problem;
  if (wrong.empty() && !closed_) wrong = transport_->prepare(request);
  const uint64_t print = fingerprint(request, wrong);
  const uint64_t record = history_.flight().submitted(request, print);
  Status status;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!stopped_) {
      queue_changed_ = Clock::now();
      queue_.push_back({std::move(request), print, std::move(wrong), queue_changed_, record});
      const Entry& head = queue_.front();
      if (in_use_ || leaving_ || calls_done || queue_.size() > 1 || !head.problem.empty()) {
        changed_.notify_all();
        return;
      }
      in_use_ = true;
      lock.unlock();
      return serve_at_once(head);
    }
    status = cannot_run(request, code_, why_stopped_);
  }
  Entry late{std::move(request), print, {}, {}, record};
  finish(late, status);
}

Status Engine::wait_in(void* stream) {
  const Counted this_thread(submitting_);
  const std::string wrong = closed_ ? "the engine has ended." : transport_->wait_in(stream);
  return wrong.empty() ? Status() : Status::error(Code::internal, wrong);
}

// On a thread that submits. What is not done at once is left to the engine's thread.
void Engine::serve_at_once(const Entry& head) {
  std::optional<Entry> entry;
  Status status;
  try {
    const StandardArithmetic as_in_the_engines_thread;
    std::optional<Summary> agreement;
    all_or_abort([&] {
      check_other_sets();
      agreement = transport_->agree(history_.proposal(head.fingerprint), &head.request, {});
    });
    if (agreement && agreement->all_propose(head.fingerprint)) {
      history_.agreed(*agreement);
      entry = take_head();
      status = run(*entry);
    } else {
      agreed_ = std::move(agreement);
    }
  } catch (const Aborted& why) {  // which the engine's thread will get from its next call, too
    if (entry) status = aborted(*entry, why);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_ = false;
    if (leaving_ || !queue_.empty()) changed_.notify_all();
  }
  if (!entry) return;
  calls_done = true;
  finish(*entry, status);
  calls_done = false;
}

void Engine::loop() try {
  const StandardArithmetic for_all_sums;
  all_or_abort([this] {
    while (serve_next()) {
    }
  });
} catch (const Aborted& aborted) {
  stop(LeaveResult::aborted, Code::deadline_exceeded, aborted.what());
}

// Returns whether the ranks go on.
bool Engine::serve_next() {
  const Entry* const entry = wait_for_head();
  const uint64_t head = entry ? entry->fingerprint : kLeaving;
  std::optional<Summary> agreement = std::exchange(agreed_, {});
  if (!agreement) {
    check_other_sets();
    const Proposal mine = history_.proposal(head);
    const auto waiting = [&](double seconds, const Missing& missing) -> std::string {
      // A rank may finish long after another.
      return watch(seconds, [&] { return head_waits_for(missing()); }, head != kLeaving);
    };
    const bool runs = entry && entry->problem.empty();
    agreement = transport_->agree(mine, runs ? &entry->request : nullptr, waiting);
  }
  history_.agreed(*agreement);
  if (!agreement->all_propose(head)) return negotiate();
  if (head != kLeaving) {
    serve(take_head());
    return true;
  }
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    why = "this rank had " + reason_ + ".";
  }
  if (why.find("hvd.shutdown()") != std::string::npos) why += " Call hvd.init() again first.";
  stop(LeaveResult::all_left, Code::aborted, why);
  return false;
}

// Waits for a request, or for this rank to leave (null). Returns what to propose to the other
// ranks. While it waits, threads that submit may use the transport.
const Engine::Entry* Engine::wait_for_head() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto called = [this] { return leaving_ || !queue_.empty(); };
  const auto may_go_on = [&] { return !in_use_ && called(); };
  while (!called()) {
    lock.unlock();
    const bool busy = transport_->busy();
    lock.lock();
    in_use_ = false;
    do {
      if (busy) changed_.wait_for(lock, Seconds(kBusySeconds), may_go_on);
      if (!busy) changed_.wait(lock, may_go_on);
    } while (in_use_);
    in_use_ = true;
  }
  return queue_.empty() ? nullptr : &queue_.front();
}

// Only the thread that uses the transport removes requests, so the head is still what the ranks
// agreed on.
Engine::Entry Engine::take_head() {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry head = std::move(queue_.front());
  queue_.pop_front();
  return head;
}

void Engine::finish(Entry& entry, const Status& status) {
  history_.flight().ended(entry.record, status);
  entry.request.done(status);
}

void Engine::serve(Entry entry) {
  Status status;
  try {
    status = run(entry);
  } catch (const Aborted& why) {
    finish(entry, aborted(entry, why));
    throw;
  }
  finish(entry, status);
}

// All but done().
Status Engine::run(Entry& entry) {
  const auto start = Clock::now();
  note_progress(start);
  history_.flight().running(entry.record);
  Request& request = entry.request;
  const Collective& row = collective(request.kind);
  Status status;
  if (!entry.problem.empty()) {
    status = Status::error(Code::invalid_argument, identity(request) + ": " + entry.problem);
  } else {
    if (row.joins) end_joining(request);
    uint64_t bytes = 0;
    for (const Input& input : request.inputs)
      bytes += elements(input.shape) * size_of(on_the_wire(request, input.dtype));
    all_or_abort([&] {
      status = transport_->run(request, [&](double seconds, const Missing& missing) -> std::string {
        return watch(seconds, [&] {
          return who(missing()) + " stopped responding in the middle of " + identity(request) + ".";
        });
      });
    });
    history_.served(row.name, request.name, bytes, entry.submitted, start);
  }
  ++served_;
  return status;
}

}  // namespace hvd
