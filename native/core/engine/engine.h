// The engine of one process set: a queue of requests and the thread that serves it.
//
//   submit ──> queue ──> agree on the head (one 64-bit comparison over all ranks)
//                          ├─ equal: transport.run(head) ──> done()
//                          └─ not:   the ranks combine what they have queued, see agreement.h
//
// If nothing is queued, the thread that submits a small request serves it itself, if the other
// ranks come within microseconds. Otherwise the engine's thread goes on with it.
//
// One thread at a time uses the transport, the one that has set in_use_:
//
//   idle  (queue empty, in_use_ false)
//     │ submit() of a small request: the submitting thread sets in_use_
//     ├──> at once ──> run, done() ──> idle;  not all came in time: queue ──> serving
//     │ submit() of another, or a leave: the engine's thread sets in_use_
//     └──> serving ──> run, done() ──> serving, while the queue has requests ──> idle
//            │ not all ranks propose the same: negotiate, and go on as that says
//            └──> stopped (all ranks leave, or the job aborts): every request fails with the reason
//
// There is no coordinator and no cycle: ranks that submit in the same order, as TensorFlow's
// functions do, never negotiate. docs/protocol.md describes the protocol.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/settings.h"
#include "core/engine/agreement.h"
#include "core/engine/recorder.h"
#include "core/request/request.h"
#include "core/request/transport.h"

namespace hvd {

class Engine {
 public:
  // In the order of hvd_leave()'s results (c_api.cc).
  enum class LeaveResult { all_left, left_early, no_answer, peer_left, aborted };

  // Reports everything it does to the recorder.
  Engine(std::unique_ptr<Transport> transport, const Settings& settings,
         std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(), int process_set = 0);
  ~Engine() { close(); }

  const std::vector<int>& ranks() const { return ranks_; }

  // Thread-safe. Waits microseconds for other ranks, and longer only for one that stops in the
  // middle of a small request. A request that cannot run is done() with its error, on all ranks.
  void submit(Request request);

  // See Transport::wait_in. Thread-safe.
  Status wait_in(void* stream);

  // Says that this rank submits nothing more.
  void announce_leaving(const std::string& reason);

  // Waits for the others to leave too, at most `seconds` (< 0: without limit).
  LeaveResult leave(double seconds);

  // Ends the engine's thread, which has stopped or soon will, and then the transport, so that other
  // threads may keep the engine for as long as they like. Waits for those that submit.
  void close();

 private:
  struct Entry {
    Request request;
    uint64_t fingerprint = 0;
    std::string problem;
    Clock::time_point submitted;
    uint64_t record = 0;  // of the flight recorder
  };

  void loop();
  bool serve_next();
  const Entry* wait_for_head();
  Entry take_head();
  void serve_at_once(const Entry& head);
  void serve(Entry entry);
  Status run(Entry& entry);
  void finish(Entry& entry, const Status& status);
  template <typename Call>
  void all_or_abort(const Call& call);

  // In ends.cc.
  Status aborted(const Entry& entry, const Aborted& why);
  void check_other_sets();
  void stop(LeaveResult result, Code code, const std::string& why);

  // In negotiation.cc.
  bool negotiate();
  template <typename T>
  T of_all(const T& mine);
  void fail_first(size_t count, const Status& status);
  bool take(uint64_t identity, Entry* entry);
  Report report(double idle);
  void end_joining(Request& request);
  void nobody_has_joined();
  std::string head_waits_for(const std::vector<int>& missing);
  std::string who(const std::vector<int>& missing) const;
  std::string watch(double seconds, const std::function<std::string()>& text,
                    bool has_deadline = true);
  void note_progress(Clock::time_point now = Clock::now());
  double idle_seconds() const;
  double timeout() const;

  std::unique_ptr<Transport> transport_;
  const std::vector<int> ranks_;
  const Settings settings_;
  std::atomic<bool> closed_{false};
  std::atomic<int> submitting_{0};  // threads

  std::mutex mutex_;  // guards the members up to the blank line
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool in_use_ = true;  // a thread uses the transport and what is below the blank line
  Clock::time_point queue_changed_ = Clock::now();  // by this rank
  bool leaving_ = false;
  std::string reason_;
  bool stopped_ = false;
  LeaveResult leave_result_ = LeaveResult::no_answer;
  Code code_ = Code::aborted;
  std::string why_stopped_;

  // Used by the thread that has set in_use_: the engine's, or one that submits.
  std::optional<Summary> agreed_;  // by a thread that submits, for the engine's
  uint64_t served_ = 0;
  History history_;
  Clock::time_point last_progress_ = Clock::now();
  std::optional<Clock::time_point> idle_since_;  // when a negotiation first found nothing to do
  // At the last negotiation: whether this rank had joined, the last rank (of the set) that had not,
  // and the one (of the job) that did so last.
  bool has_joined_ = false;
  int last_absent_ = static_cast<int>(ranks_.size()) - 1, last_joined_ = 0;
  double next_warning_ = settings_.stall_warning_seconds;  // 0: none

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvd
