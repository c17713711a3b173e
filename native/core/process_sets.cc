#include "core/process_sets.h"

#include <string>
#include <utility>

#include "core/kernel_api.h"
#include "core/request/collectives.h"

namespace hvd {

ProcessSets& process_sets() {
  // Never destroyed: an engine that could not leave still has its thread in MPI when the process
  // ends.
  static auto* sets = new ProcessSets;
  return *sets;
}

void submit(Request request) { process_sets().submit(std::move(request)); }

void ProcessSets::submit(Request request) const {
  if (forked()) {
    return request.done(cannot_run(
        request, Code::failed_precondition,
        "this process was forked after hvd.init() and is no rank. Call collectives only in the "
        "process that has called hvd.init()."));
  }
  ProcessSet set;
  Status status = find(request.process_set, &set);
  if (set.engine) return set.engine->submit(std::move(request));
  if (status.ok()) {
    status = Status::error(Code::invalid_argument, identity(request) +
                                                       ": this rank is not in process set " +
                                                       std::to_string(request.process_set) + ".");
  }
  request.done(status);
}

Status wait_for_requests(int process_set, void* stream) {
  ProcessSet set;
  const Status status = process_sets().find(process_set, &set);
  return set.engine ? set.engine->wait_in(stream) : status;
}

Status ProcessSets::find(int id, ProcessSet* set) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sets_.empty()) {
    return Status::error(Code::failed_precondition,
                         "hvd_keras is not initialised in this process. Call hvd.init() first.");
  }
  const auto found = sets_.find(id);
  if (found == sets_.end()) {
    return Status::error(Code::failed_precondition,
                         "there is no process set " + std::to_string(id) +
                             ". Add it first (hvd.add_process_set), on every rank.");
  }
  *set = found->second;
  return {};
}

void ProcessSets::add(int id, const ProcessSet& set) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = set;
}

void ProcessSets::remove(int id) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(id);
}

void ProcessSets::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.clear();
}

std::vector<std::shared_ptr<Engine>> ProcessSets::engines() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Engine>> engines;
  for (const auto& [id, set] : sets_) {
    if (set.engine) engines.push_back(set.engine);
  }
  return engines;
}

}  // namespace hvd
