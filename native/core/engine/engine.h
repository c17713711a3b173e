// The engine of one process set: a queue of requests and the thread that serves it.
//
//   submit ──> queue ──> agree on the head (one 64-bit comparison over all ranks)
//                          ├─ equal: transport.run(head) ──> done()
//                          └─ not:   every rank reports its queue, see agreement.h
//
// There is no coordinator and no cycle: ranks that submit in the same order, as TensorFlow's
// functions do, never negotiate. docs/protocol.md describes the protocol.
#pragma once

#include <condition_variable>
#include <deque>
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
  // How a rank left: with all others; while others still waited for it (they have been told);
  // without an answer from the others in time; after another rank had left while this one waited
  // for it; after a deadline had passed.
  enum class LeaveResult { together, alone, unheard, deserted, lost };

  // Reports everything it does to the recorder.
  Engine(std::unique_ptr<Transport> transport, const Settings& settings,
         std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(), int process_set = 0);
  ~Engine();

  const std::vector<int>& ranks() const { return transport_->ranks(); }

  // Thread-safe, does not block. A request that cannot run is done() with its error, on all ranks.
  void submit(Request request);

  // Says that this rank submits nothing more.
  void announce_leaving(const std::string& reason);

  // Waits for the others to leave too, at most `seconds` (< 0: for ever).
  LeaveResult leave(double seconds);

 private:
  struct Entry {
    Request request;
    uint64_t fingerprint;
    std::string problem;
    Clock::time_point submitted;
  };

  void loop();
  void serve(const std::string& identity, const std::string& header);
  bool negotiate();
  void stop(LeaveResult result, Code code, const std::string& why);
  void fail_first(size_t count, const Status& status);
  bool take(const std::string& identity, Entry* entry);
  Report report();
  void note_joined(const std::vector<bool>& joined);
  std::string who(const std::vector<int>& ranks) const;
  template <typename Text>
  std::string watch(double seconds, const Text& text);
  void note_progress();
  double idle_seconds() const;
  double timeout() const;

  const std::unique_ptr<Transport> transport_;
  const Settings settings_;

  std::mutex mutex_;  // guards what follows, up to the blank line
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  Clock::time_point queue_changed_ = Clock::now();  // by this rank
  bool leaving_ = false;
  std::string reason_;
  bool stopped_ = false;
  LeaveResult leave_result_ = LeaveResult::unheard;
  Code code_ = Code::aborted;
  std::string why_stopped_;

  // Used by the engine's thread only.
  uint64_t served_ = 0;
  History history_;
  Clock::time_point last_progress_ = Clock::now();
  std::optional<Clock::time_point> idle_since_;  // when a negotiation first found nothing to do
  std::vector<bool> joined_;                     // in the last negotiation, by rank of the set
  int last_joined_ = 0;
  bool warned_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvd
