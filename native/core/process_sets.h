// Process sets: their sizes, this process's ranks, and the engines that run their requests.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/request/request.h"

namespace hvd {

struct ProcessSet {
  int rank = -1;  // of this process in the set; -1: not a member
  int size = 0;
  std::shared_ptr<Engine> engine;  // null: not a member
};

// Thread-safe. Empty before hvd.init(), which adds set 0, that of all ranks.
class ProcessSets {
 public:
  void add(int id, const ProcessSet& set);
  void remove(int id);
  void clear();

  // Fails if there is no such set.
  Status find(int id, ProcessSet* set) const;
  // Of all sets.
  std::vector<std::shared_ptr<Engine>> engines() const;

  // A fork of this process, which has the sets but no threads, is no rank: its requests fail.
  void note_fork() { forked_ = true; }
  bool forked() const { return forked_; }

  // Hands a request to the engine of its process set.
  void submit(Request request) const;

 private:
  mutable std::mutex mutex_;
  std::map<int, ProcessSet> sets_;
  std::atomic<bool> forked_{false};
};

// Those of this process.
ProcessSets& process_sets();

}  // namespace hvd
