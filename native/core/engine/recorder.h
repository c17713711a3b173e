// What the engines of this process have done, and how long the ranks waited for each other.
//
//   engine ── served() ──> History, one per process set ── agreed() ──> Recorder, one per process
//                                                                        ├─ counters: stats()
//                                                                        └─ trace, if asked for
//
// Clocks of different ranks are never compared. With each proposal a rank reports how long it
// waited since its previous proposal. An agreement ends on all ranks at once (up to a millisecond,
// by which a long wait may oversleep), by which hvd_keras/timeline.py joins the ranks' traces.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/engine/flight_recorder.h"
#include "core/request/transport.h"

namespace hvd {

// A request that has run, as in a trace: hvd_keras/timeline.py knows the layout.
struct Served {
  uint64_t process_set;
  uint64_t turn;      // how many the process set has run; the same on all its ranks
  uint64_t ready_ns;  // submitted, and the engine was free; on the host's steady clock, as
  uint64_t start_ns;  // all ranks had agreed on it
  uint64_t end_ns;
  uint64_t bytes;        // of this rank's inputs
  char title[208] = {};  // kind and name, cut to this size
};

class Recorder {
 public:
  // For one rank of a job of `size` ranks.
  explicit Recorder(int rank = 0, int size = 1) : rank_(rank), size_(size) {}
  ~Recorder() { trace(-1); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Appends each request that has run to this file, until it cannot be written, and closes it at
  // the end; -1: to none.
  void trace(int descriptor);

  // Counters as JSON, see docs/observing.md.
  std::string stats();
  // Stops the clock of the job's duration.
  void note_end();

  // That a process set was aborted; the first reason counts. Empty: none was.
  void note_abort(const std::string& why);
  std::string why_aborted();

  // The last requests, for a postmortem.
  FlightRecorder& flight() { return flight_; }

  void served(const std::string& kind, const std::string& name, const Served& event);
  // How long the ranks (of the job) of a process set have waited before an agreement.
  void agreed(const std::vector<int>& ranks, const Summary& agreement);

 private:
  struct Counters {
    uint64_t requests = 0, bytes = 0, waited_ns = 0, ran_ns = 0;
  };
  struct Lateness {
    uint64_t times = 0;
    uint64_t ns = 0;
  };

  const int rank_, size_;
  FlightRecorder flight_;
  const Clock::time_point begun_ = Clock::now();

  std::mutex mutex_;  // guards the members below
  Clock::time_point ended_{};
  std::string why_aborted_;
  std::atomic<bool> is_aborted_{false};
  std::map<std::string, Counters> kinds_;
  std::map<int, Lateness> ranks_;
  int trace_ = -1;  // the descriptor
};

// What one engine records; used by its thread only.
class History {
 public:
  History(std::shared_ptr<Recorder> recorder, int process_set, const Transport& transport)
      : recorder_(std::move(recorder)), process_set_(process_set), transport_(transport) {}

  // A request ran from `start` until now.
  void served(const std::string& kind, const std::string& name, uint64_t bytes,
              Clock::time_point submitted, Clock::time_point start);
  FlightRecorder& flight() { return recorder_->flight(); }
  void note_abort(const std::string& why) { recorder_->note_abort(why); }
  std::string why_aborted() { return recorder_->why_aborted(); }
  // The engine is free for its next request from now on.
  void free() { free_since_ = Clock::now(); }
  // This rank's next one.
  Proposal proposal(uint64_t fingerprint) const { return {fingerprint, 0, waited_ns_}; }
  void agreed(const Summary& agreement);

 private:
  const std::shared_ptr<Recorder> recorder_;
  const int process_set_;
  const Transport& transport_;
  Clock::time_point free_since_ = Clock::now();
  uint64_t turn_ = 0;
  uint64_t waited_ns_ = 0;  // since the last agreement
};

}  // namespace hvd
