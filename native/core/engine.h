// The engine of one process set: a queue of requests and the thread that serves it.
//
//   submit ──> queue ──> agree on the head (one 64-bit comparison over all ranks)
//                          ├─ equal: transport.run(head) ──> done()
//                          └─ not:   every rank reports its queue, see agreement.h
//
// There is no coordinator and no cycle: ranks that submit in the same order, as TensorFlow's
// functions do, never negotiate. The protocol is told in docs/protocol.md.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/agreement.h"
#include "core/recorder.h"
#include "core/request.h"
#include "core/settings.h"
#include "core/transport.h"

namespace hvd {

class Engine {
 public:
  // How a rank left: with all others; while others still waited for it (they have been told);
  // without an answer from the others within the time allowed; after another had left it alone;
  // after the ranks had waited too long for one of them.
  enum class Farewell { together, alone, unheard, deserted, lost };

  // Tells the recorder of all that it does.
  Engine(std::unique_ptr<Transport> transport, const Settings& settings,
         std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(), int process_set = 0);
  ~Engine();

  const std::vector<int>& ranks() const { return transport_->ranks(); }

  // Thread-safe, does not block. A request that cannot run is done() with its error, on all ranks.
  void submit(Request request);

  // Says that this rank submits nothing more.
  void announce_leaving(const std::string& reason);

  // Waits for the others to leave too, at most `seconds` (< 0: for ever).
  Farewell leave(double seconds);

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
  void stop(Farewell farewell, Code code, const std::string& why);
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
  Farewell farewell_ = Farewell::unheard;
  Code code_ = Code::aborted;
  std::string why_stopped_;

  // The engine's thread alone uses these.
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
