// Runs a plan, with the core as it ships, and checks what becomes of each request.
#pragma once

#include <mpi.h>

#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/engine/engine.h"
#include "tests/simulate/plan.h"
#include "tests/simulate/transport.h"

namespace hvd::sim {

// Differs by request, rank and element. Sums of floats depend on their order.
inline double value(const Item& item, int rank, int64_t index) {
  Random random(item.key + (static_cast<uint64_t>(rank) << 32) + static_cast<uint64_t>(index));
  const double unit = static_cast<double>(random.next() >> 40) / (1 << 24);
  return item.dtype == DType::int32 ? std::floor(unit * 200) - 100 : unit * 2 - 1;
}

inline int64_t rows_of(const Item& item, int rank) { return item.rows + rank % 3; }
inline int64_t split(const Item& item, int from, int to) { return item.rows + (from + 2 * to) % 3; }

class Job {
 public:
  struct Call {
    Item item;
    std::vector<double> in;
    std::vector<char> input, output;
    std::vector<int64_t> splits, received;
    Status status;
    Fiber* waiter = nullptr;
    uint64_t bits = 0;  // of the result, when it was done
    Nanoseconds submitted = 0, ended = 0;
    bool done = false, kept = false;
  };

  explicit Job(uint64_t seed, bool shows = false) : plan(seed), simulation_(seed, shows) {
    for (int r = 0; r < plan.ranks; ++r) {
      Process& process = simulation_.processes.emplace_back();
      process.rank = r;
      process.host = plan.host[r];
      process.clock_offset = simulation_.random.upto(1000) * kSecond;
      for (const Item& item : plan.programs[r]) {
        calls_.emplace_back();
        calls_.back().item = item;
      }
      (void)reasons_[r];
    }
    new_network(plan.conditions);
  }

  // The first violation, or nothing.
  std::string run() {
    auto call = calls_.begin();
    for (int r = 0; r < plan.ranks; ++r) {
      const size_t n = plan.programs[r].size();
      std::vector<Call*> own;
      for (size_t i = 0; i < n; ++i) own.push_back(&*call++);
      of_rank_.push_back(own);
    }
    for (int r = 0; r < plan.ranks; ++r)
      simulation_.start(simulation_.processes[r], [this, r] { script(r); });
    simulation_.run(100 * kSecond);
    for (int r = 0; r < plan.ranks; ++r) check_end(r);
    if (is_clean() && all_left_ < plan.ranks) simulation_.violate("not all ranks have left");
    return simulation_.violation;
  }

  uint64_t hash() const { return simulation_.hash(); }
  uint64_t events() const { return simulation_.events(); }
  void logged(const std::string& text) {
    simulation_.trace("log: " + text);
    aborts_for_mpi_ |= text.find(" failed: a link is cut") != std::string::npos;
  }

  static Job* current;
  Plan plan;
  std::map<std::string, int> counts;

 private:
  // What a rank's Python script and lifecycle.py do.
  void script(int r) {
    Process& process = simulation_.processes[r];
    const auto recorder = std::make_shared<Recorder>(r, plan.ranks);
    std::vector<std::unique_ptr<Engine>> engines;
    for (const int set : {0, 1}) {
      const std::vector<int>& ranks = plan.members(set);
      const bool inside = std::count(ranks.begin(), ranks.end(), r) > 0;
      MPI_Comm members;
      MPI_Comm_split(MPI_COMM_WORLD, inside ? 0 : MPI_UNDEFINED, r, &members);
      if (!inside) continue;
      engines.push_back(
          std::make_unique<Engine>(new_transport(members, ranks, plan.few, plan.settings.allreduce),
                                   plan.settings, recorder, set));
    }
    if (++ready_ == plan.ranks) begin_faults();
    std::string reason = "the script of rank " + std::to_string(r) + " has ended";
    bool failed = false;
    for (Call* call : of_rank_[r]) {
      think();
      submit(*call, r, *engines[call->item.set]);
      if (plan.waits_each[r]) wait(*call);
      failed = call->done && !call->status.ok() &&
               !(plan.catches && plan.refused.count(call->item.text()));
      if (failed) break;
    }
    for (Call* call : of_rank_[r])
      if (call->submitted && !failed) wait(*call);
    if (plan.stays.count(r)) simulation_.block(kNever);
    think();
    reasons_[r] = reason;
    Engine::LeaveResult result = Engine::LeaveResult::all_left;
    for (const auto& engine : engines) engine->announce_leaving("left the job: " + reason);
    for (const auto& engine : engines) result = std::max(result, engine->leave(5));
    simulation_.trace("leaves: " + std::to_string(static_cast<int>(result)));
    all_left_ += result == Engine::LeaveResult::all_left;
    if (result == Engine::LeaveResult::all_left) {
      for (const auto& engine : engines) engine->close();
    }
    for (Call* call : of_rank_[r]) {
      if (call->done && !call->kept && call->bits != bits(*call))
        simulation_.violate("the memory of " + call->item.text() + " has changed after its end");
    }
    ended_.insert(r);
    if (result == Engine::LeaveResult::all_left) return;
    for (auto& engine : engines) engine.release();  // its thread ends with the process
    process.dead = true;                            // what it has sent still arrives
    simulation_.block(kNever);
  }

  void think() {
    Random& random = simulation_.random;
    if (random.chance(2))
      simulation_.sleep(random.upto(random.chance(10) ? 20'000 : 500) * kMicrosecond);
  }

  void begin_faults() {
    for (const Fault& fault : plan.faults) {
      simulation_.at(simulation_.now + fault.time, [this, fault] {
        if (fault.what == Fault::cut) return cut(fault.rank, fault.other, fault.noticed);
        Process& process = simulation_.processes[fault.rank];
        simulation_.trace((fault.what == Fault::kill ? "kills rank " : "stops rank ") +
                          std::to_string(fault.rank));
        if (fault.what == Fault::kill) return simulation_.kill(process);
        process.paused_until = fault.length == kNever ? kNever : simulation_.now + fault.length;
      });
    }
  }

  void submit(Call& call, int r, Engine& engine) {
    const Item& item = call.item;
    const std::vector<int>& with = plan.members(item.set);
    Request request;
    request.kind = item.kind;
    request.process_set = item.set;
    request.name = item.name;
    request.reduction = item.reduction;
    request.root = item.root;
    request.problem = item.problem;
    int64_t n = item.kind == Kind::allgather ? rows_of(item, r) : item.rows;
    if (item.kind == Kind::alltoall) {
      for (int to : with) call.splits.push_back(split(item, r, to));
      n = std::accumulate(call.splits.begin(), call.splits.end(), int64_t{0});
    }
    const Shape shape = item.odd ? Shape{n, 1} : Shape{n};
    call.input.resize(n * 4);
    for (int64_t i = 0; i < n; ++i) store(item, value(item, r, i), call.input.data(), i);
    if (item.kind != Kind::barrier && item.kind != Kind::join)
      request.inputs.push_back({call.input.data(), item.dtype, shape});
    if (item.kind == Kind::alltoall)
      request.inputs.push_back(
          {call.splits.data(), DType::int64, {static_cast<int64_t>(with.size())}});
    if (collective(item.kind).keeps_shape) {
      call.output.resize(call.input.size());
      request.outputs.push_back(call.output.data());
    }
    request.allocate = [&call](size_t index, const Shape& wanted, void** data) {
      if (call.item.throws) throw std::bad_alloc();
      if (call.item.lacks_memory) return Status::error(Code::internal, "no memory");
      if (index == 1) {
        call.received.resize(elements(wanted));
        *data = call.received.data();
      } else {
        call.output.resize(elements(wanted) * 4);
        *data = call.output.data();
      }
      return Status();
    };
    request.keep = [&call] { call.kept = true; };
    request.done = [this, &call, r](const Status& status) { done(call, r, status); };
    call.submitted = simulation_.now;
    simulation_.trace("submits " + item.text());
    engine.submit(std::move(request));
  }

  void wait(Call& call) {
    call.waiter = simulation_.fiber();
    while (!call.done) simulation_.block(kNever);
  }

  static void store(const Item& item, double number, char* data, int64_t index) {
    if (item.dtype == DType::int32) {
      reinterpret_cast<int32_t*>(data)[index] = static_cast<int32_t>(number);
    } else {
      reinterpret_cast<float*>(data)[index] = static_cast<float>(number);
    }
  }

  static uint64_t bits(const Call& call) {
    Hash hash;
    for (size_t i = 0; i < call.output.size() / 4; ++i)
      hash.add(uint64_t{reinterpret_cast<const uint32_t*>(call.output.data())[i]});
    for (int64_t number : call.received) hash.add(static_cast<uint64_t>(number));
    return hash.value();
  }

  void done(Call& call, int r, const Status& status) {
    const std::string what = call.item.text();
    if (call.done) simulation_.violate(what + " is done twice");
    call.done = true;
    call.ended = simulation_.now;
    call.status = status;
    call.bits = bits(call);
    simulation_.trace(what + ": " + (status.ok() ? std::to_string(call.bits) : status.message));
    if (call.waiter) simulation_.wake(call.waiter);
    const std::vector<int>& with = plan.members(call.item.set);
    const bool over_mpi = plan.host[with.front()] != plan.host[with.back()];
    // Not if all have agreed on it: then no message is under way.
    simulation_.processes[r].aborted |=
        over_mpi && status.code == Code::deadline_exceeded &&
        status.message.find("wait for different collectives") == std::string::npos;
    ++counts[status.ok() ? "run" : "failed with " + std::to_string(static_cast<int>(status.code))];
    if (status.ok()) {
      check_result(call, r);
    } else {
      check_error(call, r, status);
    }
  }

  void check_result(const Call& call, int r) {
    const Item& item = call.item;
    const std::vector<int>& with = plan.members(item.set);
    const auto wrong = [&](const std::string& why) {
      simulation_.violate(item.text() + " of rank " + std::to_string(r) + " " + why);
    };
    // A reason that is not long, and not cut off, has come before.
    const auto given_up = given_up_.find(item.text());
    if (given_up != given_up_.end() && call.submitted > given_up->second + 2 * kSecond &&
        plan.conditions.eager_bytes >= 4096 && !plan.cuts())
      wrong("runs although others have given it up");
    if (mismatched_) return;  // so ranks differ in which requests belong together
    // A rank that differs from none, since they have joined, may run it.
    if (plan.refused.count(item.text()) && !plan.joining) wrong("runs although a rank cannot");
    std::vector<int> taking;
    for (int q : with) {
      if (plan.find(q, item))
        taking.push_back(q);
      else if (!plan.joins(plan.programs[q]))
        wrong("runs without rank " + std::to_string(q));
    }
    std::vector<double> wanted;
    const auto append = [&](int q, int64_t first, int64_t n) {
      for (int64_t i = first; i < first + n; ++i) wanted.push_back(value(item, q, i));
    };
    switch (item.kind) {
      case Kind::barrier:
        return;
      case Kind::join: {
        const int last = *reinterpret_cast<const int32_t*>(call.output.data());
        if (last < 0 || last >= plan.ranks) wrong("names no rank");
        break;
      }
      case Kind::broadcast:
        if (!plan.find(item.root, item)) return wrong("runs without its root");
        append(item.root, 0, item.rows);
        break;
      case Kind::allgather:
        for (int q : taking) append(q, 0, rows_of(item, q));
        break;
      case Kind::alltoall:
        for (int from : with) {
          int64_t first = 0;
          for (int to : with) {
            if (to == r) append(from, first, split(item, from, to));
            first += split(item, from, to);
          }
        }
        break;
      case Kind::reduce:
        if (!plan.find(item.root, item)) return wrong("runs without its root");
        if (r != item.root) return;
        [[fallthrough]];
      case Kind::allreduce:
      case Kind::reducescatter: {
        int64_t first = 0, end = item.rows;
        if (item.kind == Kind::reducescatter) {
          const int place = static_cast<int>(std::find(with.begin(), with.end(), r) - with.begin());
          first = first_row(item.rows, place, static_cast<int>(with.size()));
          end = first_row(item.rows, place + 1, static_cast<int>(with.size()));
        }
        for (int64_t i = first; i < end; ++i) {
          double all = item.reduction == Reduction::max ? -1e9 : 0;
          for (int q : taking) {
            const double term = value(item, q, i);
            all = item.reduction == Reduction::max ? std::max(all, term) : all + term;
          }
          wanted.push_back(item.reduction == Reduction::average ? all / with.size() : all);
        }
      }
    }
    if (item.kind != Kind::join && wanted.size() * 4 != call.output.size())
      return wrong("has another size");
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double got = item.dtype == DType::int32
                             ? reinterpret_cast<const int32_t*>(call.output.data())[i]
                             : reinterpret_cast<const float*>(call.output.data())[i];
      if (!(std::abs(got - wanted[i]) <= 2e-6 * with.size()))
        return wrong("is " + std::to_string(got) + " at " + std::to_string(i) + ", expected " +
                     std::to_string(wanted[i]));
    }
    if (item.kind == Kind::alltoall || item.kind == Kind::reducescatter) return;
    const auto first = results_.emplace(item.text(), call.bits).first;
    if (first->second != call.bits) wrong("has other bits than on another rank");
  }

  // All that is not refused must run, and all ranks leave together.
  bool is_clean() const {
    return plan.agrees && plan.culprits.empty() && (plan.catches || plan.refused.empty());
  }

  void check_error(const Call& call, int r, const Status& status) {
    const std::string& text = status.message;
    const auto wrong = [&](const std::string& why) {
      simulation_.violate(call.item.text() + " of rank " + std::to_string(r) + " " + why + ": " +
                          text);
    };
    if (is_clean() && !plan.refused.count(call.item.text())) return wrong("fails without a reason");
    bool left = false;
    for (const auto& [rank, reason] : reasons_) {
      if (text.find("rank " + std::to_string(rank) + " has left the job") == std::string::npos)
        continue;
      left = true;
      if (reason.empty() || text.find(reason) == std::string::npos)
        wrong("names a rank that has not left");
    }
    switch (status.code) {
      case Code::aborted:
        if (!left && text.find("could not allocate") == std::string::npos) wrong("is odd");
        break;
      case Code::invalid_argument:
        if (text.find("cannot") == std::string::npos) wrong("is odd");
        break;
      case Code::failed_precondition:
        if (plan.agrees && plan.refused.empty()) wrong("is no mismatch");
        mismatched_ |= text.find("none has called another") != std::string::npos;
        break;
      case Code::deadline_exceeded:
        if (plan.leaves_early && text.find("wait for different collectives") == std::string::npos)
          wrong("does not say who has left");
        given_up_.emplace(call.item.text(), simulation_.now);
        check_accusation(text, r, wrong);
        break;
      case Code::internal:
        if (!call.item.lacks_memory) wrong("is odd");
        break;
      default:
        wrong("is odd");
    }
  }

  // Whether one of the ranks that the text blames keeps the others waiting.
  template <typename Wrong>
  void check_accusation(const std::string& text, int r, const Wrong& wrong) {
    if (text.find("wait for different collectives") != std::string::npos) return;  // blames nobody
    std::string blamed;
    for (const char* after : {" has not submitted.", " stopped responding in the middle",
                              " does not take part in a negotiation", " cannot go on: "}) {
      const size_t end = text.find(after);
      if (end == std::string::npos) continue;
      for (const std::string before : {", which ", " s: ", " run: "}) {
        const size_t at = text.rfind(before, end);
        if (at == std::string::npos) continue;
        blamed = text.substr(at + before.size(), end - at - before.size());
        break;
      }
    }
    if (!accusations_.insert(blamed).second) return;  // heard from another rank, who may have ended
    int named = 0, guilty = 0;
    for (int q = 0; q < plan.ranks; ++q) {
      const std::string name = "rank " + std::to_string(q);
      if (blamed != name && blamed.find(name + " (") == std::string::npos) continue;
      ++named;
      // With two process sets, a rank may wait in the other one, or have done so until just now.
      const auto waits = [this](const Call* call) {
        const bool until_now =
            call->ended > call->submitted + kSecond && simulation_.now < call->ended + kSecond;
        return call->submitted && (!(call->done && call->status.ok()) || until_now);
      };
      const bool elsewhere =
          !plan.some.empty() && std::any_of(of_rank_[q].begin(), of_rank_[q].end(), waits);
      guilty +=
          plan.culprits.count(q) || ended_.count(q) || simulation_.processes[q].dead || elsewhere;
    }
    ++counts[named == 0        ? "names nobody"
             : guilty == named ? "names culprits"
                               : "names others, too"];
    // Around a cut link all wait, and say so; who was stopped for long finds that all have waited,
    // as those have who ended since.
    const auto accuses = [&](int q) {
      return q == r || text.find(": rank " + std::to_string(q) + " waits for") != std::string::npos;
    };
    const bool nobody_else = plan.cuts() || !ended_.empty() ||
                             std::any_of(plan.culprits.begin(), plan.culprits.end(), accuses);
    if (guilty == 0 && !(named == 0 && nobody_else)) wrong("names no culprit");
  }

  void check_end(int r) {
    const Process& process = simulation_.processes[r];
    const std::string who = "rank " + std::to_string(r);
    if (ended_.count(r) || process.paused_until == kNever || plan.stays.count(r)) return;
    if (process.dead) {
      const bool killed =
          !plan.faults.empty() && plan.faults[0].what == Fault::kill && plan.faults[0].rank == r;
      if (!killed && !(mpi_aborted() && aborts_for_mpi_))
        simulation_.violate(who + " has ended without an error");
      return;
    }
    simulation_.violate(who + " waits for ever");
  }

  Simulation simulation_;
  std::deque<Call> calls_;
  std::vector<std::vector<Call*>> of_rank_;
  int ready_ = 0, all_left_ = 0;
  bool aborts_for_mpi_ = false, mismatched_ = false;
  std::set<int> ended_;
  std::set<std::string> accusations_;
  std::map<std::string, Nanoseconds> given_up_;  // requests, by the first rank that did
  std::map<int, std::string> reasons_;           // of leaving, by rank
  std::map<std::string, uint64_t> results_;      // bits, by request
};

}  // namespace hvd::sim
