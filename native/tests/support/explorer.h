// A random schedule: programs of 2 to 4 ranks, random speeds, ranks that join, leave early, or
// never submit what the others wait for; and what must become of each request.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/agree.h"
#include "tests/support/check.h"

namespace hvd::test {

using Decide = std::function<Decided(const std::vector<Report>&)>;

struct Call {
  std::string identity;
  int occurrence = 0;  // of this identity in the program: equal ones belong together
  std::string signature = "usual";
  std::string problem = "";
  int needs = Pending::nobody;

  bool joins() const { return identity == "join"; }
  std::string text() const { return identity + "#" + std::to_string(occurrence); }
};

struct Rank {
  std::vector<Call> program;
  bool whole = true;   // otherwise it leaves without what the others have yet to submit
  bool stays = false;  // or stays, and they wait for it
  size_t submitted = 0;
  std::deque<Call> queue;
  bool left = false;
  int idle = 0;       // rounds in a row that found nothing to do
  int unchanged = 0;  // those of them since it submitted something
  std::vector<std::string> history;

  bool settled() const { return submitted == program.size() && (whole || left || stays); }
  bool joined() const {
    return std::any_of(queue.begin(), queue.end(), [](const Call& call) { return call.joins(); });
  }
};

struct Counts {
  int run = 0, stood_in = 0, refused = 0, failed = 0, left = 0, mismatched = 0, stuck = 0,
      negotiated = 0, unnegotiated = 0;
};

class Schedule {
 public:
  Schedule(unsigned seed, const Decide& decide)
      : random_(seed), finds_mismatches_(seed % 2), decide_(decide), ranks_(2 + seed % 3) {
    std::vector<Call> calls;
    for (int name = 0, names = upto(4) + 1; name < names; ++name) {
      for (int i = 0, occurrences = upto(1) + 1; i < occurrences; ++i)
        calls.push_back({std::string(1, static_cast<char>('a' + name))});
    }
    const int last = static_cast<int>(ranks_.size()) - 1;
    std::map<std::string, int> odd, wrong, needed;  // ranks, by call
    const bool one_order = chance(3), joining = chance(4);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      if (r == 0 || !one_order) std::shuffle(calls.begin(), calls.end(), random_);
      std::map<std::string, int> seen;
      for (Call call : calls) {
        call.occurrence = seen[call.identity]++;
        if (r == 0) {
          if (chance(6)) odd[call.text()] = upto(last);
          if (chance(10)) wrong[call.text()] = upto(last);
          if (chance(4)) needed[call.text()] = chance(4) ? Pending::everybody : upto(last);
        }
        const auto is_me = [&](const std::map<std::string, int>& table) {
          const auto found = table.find(call.text());
          return found != table.end() && found->second == static_cast<int>(r);
        };
        if (is_me(odd)) call.signature = "odd";
        if (is_me(wrong)) call.problem = "problem of rank " + std::to_string(r);
        if (needed.count(call.text())) call.needs = needed[call.text()];
        rank.program.push_back(call);
      }
      if (joining) {
        if (chance(2)) rank.program.resize(upto(static_cast<int>(rank.program.size())));
        rank.program.push_back({"join"});
      } else if (chance(5)) {
        rank.whole = false;
        rank.stays = chance(2);
        rank.program.resize(upto(static_cast<int>(rank.program.size())));
        nobody_ends_it_ = false;
      }
    }
    // What must become of each call, if nobody leaves or stays away.
    for (const Rank& rank : ranks_) {
      for (const Call& call : rank.program) {
        bool refused = false;
        std::string signature;
        for (size_t r = 0; r < ranks_.size(); ++r) {
          const Call* own = find(ranks_[r].program, call);
          refused |=
              own ? !own->problem.empty() || (!signature.empty() && signature != own->signature)
                  : call.needs == Pending::everybody || call.needs == static_cast<int>(r);
          if (own) signature = own->signature;
        }
        (refused ? to_refuse_ : to_run_).insert(call.text());
      }
    }
  }

  // The first violation, or nothing.
  std::string run() {
    for (int step = 0; step < 1000; ++step) {
      for (Rank& rank : ranks_) advance(rank);
      const bool over = all([](const Rank& rank) { return rank.settled() && rank.queue.empty(); });
      if (over || stopped_) return verdict();
      round();
      if (!violation_.empty()) return violation_;
    }
    return "endless";
  }

  Counts counts;

 private:
  int upto(int last) { return std::uniform_int_distribution<int>(0, last)(random_); }
  bool chance(int one_in) { return upto(one_in - 1) == 0; }
  template <typename Condition>
  bool all(Condition condition) const {
    return std::all_of(ranks_.begin(), ranks_.end(), condition);
  }

  static const Call* find(const std::vector<Call>& program, const Call& call) {
    const auto found = std::find_if(program.begin(), program.end(),
                                    [&](const Call& other) { return other.text() == call.text(); });
    return found == program.end() ? nullptr : &*found;
  }

  void advance(Rank& rank) {
    for (int n = upto(2); n > 0 && rank.submitted < rank.program.size(); --n) {
      rank.queue.push_back(rank.program[rank.submitted++]);
      rank.unchanged = 0;
    }
    // A rank that lacks nothing leaves when its requests are done, another whenever it likes.
    if (rank.submitted == rank.program.size() && !rank.stays &&
        (!rank.whole || rank.queue.empty()) && chance(2))
      rank.left = true;
  }

  // What the engines do together as soon as each has something to say.
  void round() {
    if (!all([](const Rank& rank) { return rank.left || !rank.queue.empty(); })) {
      // A rank that will never say anything: the transport's deadline ends it, see leave_test.cc.
      const auto silent = [](const Rank& rank) {
        return rank.stays && rank.settled() && rank.queue.empty();
      };
      stopped_ = std::any_of(ranks_.begin(), ranks_.end(), silent) &&
                 all([](const Rank& rank) { return rank.settled(); });
      return;
    }
    const auto same_head = [&](const Rank& rank) {
      const auto& first = ranks_[0].queue;
      return !rank.queue.empty() && !first.empty() && rank.queue[0].identity == first[0].identity &&
             rank.queue[0].signature == first[0].signature &&
             rank.queue[0].problem == first[0].problem;
    };
    if (all(same_head)) {
      ++counts.unnegotiated;
      const Call& head = ranks_[0].queue[0];
      return head.problem.empty() ? serve({head.identity}, {}) : serve({}, {head.identity});
    }
    ++counts.negotiated;
    std::vector<Report> reports;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Report report;
      report.rank = static_cast<int>(r);
      report.leaving = ranks_[r].left;
      report.reason = "reason " + std::to_string(r);
      if (finds_mismatches_ && ranks_[r].unchanged > 20) report.unchanged = ranks_[r].unchanged;
      report.waited = ranks_[r].idle > 30 ? ranks_[r].idle : 0;
      for (const Call& call : ranks_[r].queue) {
        report.queue.push_back(
            {call.identity, call.signature, call.problem, call.text(), call.joins(), call.needs});
      }
      reports.push_back(report);
    }
    Decided decision;
    std::string first_text;
    for (size_t r = 0; r < ranks_.size(); ++r) {  // each rank decides for itself
      decision = decide_(reports);
      std::string text = "run";
      for (const auto& step : decision.run) text += " " + step.identity + " as " + step.header;
      for (const auto& refusal : decision.refuse)
        text += " refuse " + refusal.identity + refusal.message;
      text +=
          " left " + decision.left + " mismatch " + decision.mismatch + " stuck " + decision.stuck;
      if (r == 0) first_text = text;
      if (text != first_text)
        return violate("ranks decide differently: " + first_text + " and " + text);
    }
    std::vector<std::string> run, refused;
    for (const auto& step : decision.run) run.push_back(step.identity);
    for (const auto& refusal : decision.refuse) refused.push_back(refusal.identity);
    serve(run, refused);
    if (!decision.left.empty()) return stop(decision.left);
    if (!decision.mismatch.empty()) return abort(&counts.mismatched);
    if (!decision.stuck.empty()) return abort(&counts.stuck);
    for (Rank& rank : ranks_) {
      rank.idle = decision.nothing() ? rank.idle + 1 : 0;
      rank.unchanged = decision.nothing() ? rank.unchanged + 1 : 0;
    }
    if (ranks_[0].idle > 100) violate("stuck");
  }

  void serve(const std::vector<std::string>& run, const std::vector<std::string>& refused) {
    for (const std::string& identity : refused) {
      const std::vector<Call> calls = take(identity, "refused");
      if (!violation_.empty()) return;
      const bool absent = calls.size() < ranks_.size();
      const auto fine = [&](const Call& call) {
        return call.problem.empty() && call.signature == calls[0].signature &&
               !(absent && call.needs != Pending::nobody);
      };
      if (std::all_of(calls.begin(), calls.end(), fine))
        return violate("refuses equal signatures of " + identity);
      ++counts.refused;
    }
    for (const std::string& identity : run) {
      const std::vector<Call> calls = take(identity, "run");
      if (!violation_.empty()) return;
      for (const Call& call : calls) {
        if (call.signature != calls[0].signature)
          return violate("runs different signatures of " + identity);
        if (!call.problem.empty()) return violate("runs what has a problem, " + identity);
        if (call.joins() && calls.size() < ranks_.size())
          return violate("ends joining before all have joined");
      }
      ++counts.run;
      counts.stood_in += calls.size() < ranks_.size();
    }
  }

  // Each rank's first request of this identity; a rank that has joined need not have one.
  std::vector<Call> take(const std::string& identity, const std::string& fate) {
    std::vector<Call> calls;
    for (Rank& rank : ranks_) {
      const auto found = std::find_if(rank.queue.begin(), rank.queue.end(),
                                      [&](const Call& call) { return call.identity == identity; });
      if (found == rank.queue.end()) {
        if (!rank.joined()) return violate(identity + " is not pending everywhere"), calls;
        continue;
      }
      calls.push_back(*found);
      rank.queue.erase(found);
    }
    if (calls.empty()) return violate(identity + " is pending nowhere"), calls;
    for (const Call& call : calls) {
      if (call.text() != calls[0].text()) violate("pairs different calls of " + identity);
    }
    for (Rank& rank : ranks_) rank.history.push_back(fate + " " + calls[0].text());
    return calls;
  }

  void abort(int* count) {
    stopped_ = true;
    ++*count;
    if (std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.stays; }))
      violate("gives up although all ranks do their part");
  }

  void stop(const std::string& why) {
    stopped_ = true;
    ++counts.left;
    for (const Call& call : ranks_[0].queue) {
      const auto pending = [&](const Rank& rank) {
        return std::any_of(rank.queue.begin(), rank.queue.end(),
                           [&](const Call& other) { return other.identity == call.identity; });
      };
      if (all(pending)) violate("fails what can be served");
    }
    if (all([](const Rank& rank) { return !rank.left; }))
      violate("stops although no rank has left");
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const bool named = why.find("reason " + std::to_string(r)) != std::string::npos;
      if (named != ranks_[r].left) violate("names the wrong ranks: " + why);
      counts.failed += static_cast<int>(ranks_[r].queue.size());
    }
  }

  std::string verdict() {
    if (!violation_.empty()) return violation_;
    for (const Rank& rank : ranks_) {
      if (rank.history != ranks_[0].history) return "the ranks' histories differ";
    }
    if (!nobody_ends_it_) return "";
    if (stopped_) return "stopped although every rank did its part";
    std::set<std::string> refused, run;
    for (const std::string& event : ranks_[0].history) {
      const size_t space = event.find(' ');
      (event[0] == 'r' && event[1] == 'u' ? run : refused).insert(event.substr(space + 1));
    }
    if (refused != to_refuse_) return "does not refuse exactly what differs";
    if (run != to_run_) return "does not run exactly what is equal";
    return "";
  }

  void violate(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }

  std::mt19937 random_;
  const bool finds_mismatches_;
  const Decide& decide_;
  std::vector<Rank> ranks_;
  bool nobody_ends_it_ = true;
  std::set<std::string> to_run_, to_refuse_;
  bool stopped_ = false;
  std::string violation_;
};

}  // namespace hvd::test
