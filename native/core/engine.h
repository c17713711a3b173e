// The engine of one process set: a queue of requests and the thread that serves it.
//
//   submit ──> queue ──> agree on the head (one 64-bit comparison over all ranks)
//                          ├─ equal: transport.run(head) ──> done()
//                          └─ not:   every rank reports its queue, see agreement.h
//
// There is no coordinator and no cycle: ranks that submit in the same order, as TensorFlow's
// functions do, never negotiate.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/agreement.h"
#include "core/request.h"
#include "core/settings.h"
#include "core/transport.h"

namespace hvd {

class Engine {
 public:
  // How a rank left: with all others; while others still waited for it (they have been told);
  // without an answer from the others within the time allowed; or after another had left it alone.
  enum class Farewell { together, alone, unheard, deserted };

  Engine(std::unique_ptr<Transport> transport, const Settings& settings);
  ~Engine();

  // Thread-safe, does not block. A request that cannot run is done() with its error.
  void submit(Request request);

  // Says that this rank submits nothing more. Waits for the others, at most `seconds` (< 0: for
  // ever).
  Farewell leave(const std::string& reason, double seconds);

 private:
  struct Entry {
    Request request;
    uint64_t fingerprint;
  };

  void loop();
  void serve(const std::string& identity);
  bool negotiate();
  void stop(Farewell farewell, const std::string& why);
  Entry take(const std::string& identity);
  Report report();
  void warn_if_stalled(double seconds, const std::string& text);

  const std::unique_ptr<Transport> transport_;
  const Settings settings_;

  std::mutex mutex_;  // guards what follows, up to the blank line
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool leaving_ = false;
  std::string reason_;
  bool stopped_ = false;
  Farewell farewell_ = Farewell::unheard;
  std::string why_stopped_;

  // The engine's thread alone uses these.
  double idle_seconds_ =
      0;  // spent in negotiations that found nothing to do, since the last that did
  bool warned_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvd
