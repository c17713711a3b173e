// What the engines of this process have done, and how long the ranks waited for each other.
//
//   engine ── served() ──> History, one per process set ── agreed() ──> Recorder, one per process
//                                                                        ├─ counters: stats()
//                                                                        └─ timeline, on rank 0
//
// Clocks of different ranks are never compared. With each proposal a rank reports how long it
// waited and ran since its previous proposal. An agreement ends on all ranks at once (up to a
// millisecond, by which a long wait may oversleep), so rank 0 can place these times on its own
// clock and draw a row for every rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/engine/flight_recorder.h"
#include "core/engine/trace_file.h"
#include "core/request/transport.h"

namespace hvd {

// A request that has run.
struct Served {
  std::string kind;
  std::string name;
  uint64_t bytes = 0;       // of this rank's inputs
  Clock::time_point ready;  // submitted, and the engine was free
  Clock::time_point start;  // all ranks had agreed on it
  Clock::time_point end;
};

// The name of the host of a rank (of the set).
using HostOf = std::function<std::string(int rank)>;

class Recorder {
 public:
  // For one rank of a job of `size` ranks.
  explicit Recorder(int rank = 0, int size = 1) : rank_(rank), size_(size) {}

  // Starts to write the timeline of all ranks; for rank 0. Fails if a timeline is already being
  // written, or if the file cannot be written.
  Status start_timeline(const std::string& path);
  void stop_timeline();
  // Whether it is being written.
  bool draws() const { return file_.is_open(); }

  // Counters as JSON, see docs/observing.md.
  std::string stats();
  // Stops the clock of the job's duration.
  void note_end();

  // That a process set was aborted; the first reason counts. Empty: none was.
  void note_abort(const std::string& why);
  std::string why_aborted();

  // The last requests, for a postmortem.
  FlightRecorder& flight() { return flight_; }

  void served(const Served& request);
  // The requests that the ranks (of the job) of a process set have served between two agreements,
  // with what the ranks tell of them in the second one.
  void agreed(int process_set, const std::vector<int>& ranks, const HostOf& host_of,
              const std::vector<Served>& requests, const Agreement& agreement);

 private:
  struct Counters {
    uint64_t requests = 0, bytes = 0, waited_ns = 0, ran_ns = 0;
  };
  struct Lateness {
    uint64_t times = 0;
    uint64_t ns = 0;
  };
  struct Span {
    Clock::time_point begin, end;
  };

  void draw(int process_set, const std::vector<int>& ranks, const HostOf& host_of,
            const std::vector<Served>& requests, const std::vector<WaitTimes>& all_times, int last);
  void slice(int process_set, int rank, const std::string& title, Span span,
             const std::string& arguments);
  void begin_row(int process_set, int rank, const std::string& host);
  void add(const std::string& event);
  void end_unless(const Status& status);

  const int rank_, size_;
  FlightRecorder flight_;
  const Clock::time_point begun_ = Clock::now();

  std::mutex mutex_;  // guards the members below, but for whether the file is open
  Clock::time_point ended_{};
  std::string why_aborted_;
  std::atomic<bool> is_aborted_{false};
  std::map<std::string, Counters> kinds_;
  std::map<int, Lateness> ranks_;
  TraceFile file_;
  Clock::time_point timeline_begun_{};
  // By rank and process set: the end of the last slice in the timeline.
  std::map<std::pair<int, int>, Clock::time_point> rows_;
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
  Proposal proposal(uint64_t fingerprint) const {
    return {fingerprint, recorder_->draws() ? Proposal::wants_times : uint64_t{0}, past_};
  }
  void agreed(const Agreement& agreement);

 private:
  const std::shared_ptr<Recorder> recorder_;
  const int process_set_;
  const Transport& transport_;
  Clock::time_point free_since_ = Clock::now();
  WaitTimes past_;
  std::vector<Served> since_;  // the last agreement
};

}  // namespace hvd
