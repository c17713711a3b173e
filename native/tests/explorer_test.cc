// Explores the agreement: random programs on 2 to 4 ranks, random speeds, random leaving.
// Every schedule must end on all ranks alike, each request run, refused, or failed by who left.
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/agreement.h"
#include "tests/check.h"

namespace hvd {
namespace {

using Decide = std::function<Decision(const std::vector<Report>&)>;

constexpr unsigned kSchedules = 20000;

struct Step {
  std::string identity;
  int occurrence;  // of this identity in the program: equal ones belong together
  std::string signature;

  std::string text() const { return identity + "#" + std::to_string(occurrence); }
};

struct Rank {
  std::vector<Step> program;
  bool whole = true;  // otherwise it leaves without what the others have yet to submit
  size_t submitted = 0;
  std::deque<Step> queue;
  bool left = false;
  std::vector<std::string> history;

  bool settled() const { return submitted == program.size() && (whole || left); }
};

struct Counts {
  int run = 0, refused = 0, failed = 0, left = 0, negotiated = 0, unnegotiated = 0;
};

class Schedule {
 public:
  Schedule(unsigned seed, const Decide& decide)
      : random_(seed), decide_(decide), ranks_(2 + seed % 3) {
    std::vector<Step> steps;
    for (int name = 0, names = upto(4) + 1; name < names; ++name) {
      for (int i = 0, occurrences = upto(1) + 1; i < occurrences; ++i) {
        steps.push_back({std::string(1, static_cast<char>('a' + name)), 0, ""});
      }
    }
    std::map<std::string, size_t> odd_one;  // the rank whose signature differs
    const bool one_order = chance(3);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      if (r == 0 || !one_order) std::shuffle(steps.begin(), steps.end(), random_);
      std::map<std::string, int> seen;
      for (Step step : steps) {
        step.occurrence = seen[step.identity]++;
        if (r == 0 && chance(6)) odd_one[step.text()] = upto(static_cast<int>(ranks_.size()) - 1);
        const auto found = odd_one.find(step.text());
        step.signature = found != odd_one.end() && found->second == r ? "odd" : "usual";
        rank.program.push_back(step);
      }
      if (chance(8)) {
        rank.whole = false;
        rank.program.resize(upto(static_cast<int>(rank.program.size())));
        nobody_leaves_early_ = false;
      }
    }
    odd_ = static_cast<int>(odd_one.size());
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

  void advance(Rank& rank) {
    for (int n = upto(2); n > 0 && rank.submitted < rank.program.size(); --n) {
      rank.queue.push_back(rank.program[rank.submitted++]);
    }
    // A rank that lacks nothing leaves when its requests are done, another whenever it likes.
    if (rank.submitted == rank.program.size() && (!rank.whole || rank.queue.empty()) && chance(2))
      rank.left = true;
  }

  // What the engines do together as soon as each has something to say.
  void round() {
    if (!all([](const Rank& rank) { return rank.left || !rank.queue.empty(); })) return;
    const auto same_head = [&](const Rank& rank) {
      const auto& first = ranks_[0].queue;
      return !rank.queue.empty() && !first.empty() && rank.queue[0].identity == first[0].identity &&
             rank.queue[0].signature == first[0].signature;
    };
    if (all(same_head)) {
      ++counts.unnegotiated;
      return serve({ranks_[0].queue[0].identity}, {});
    }
    ++counts.negotiated;
    std::vector<std::string> bytes;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Report report{{}, ranks_[r].left, "reason " + std::to_string(r)};
      for (const Step& step : ranks_[r].queue)
        report.queue.push_back({step.identity, step.signature});
      bytes.push_back(encode(report));
    }
    Decision decision;
    std::string first_text;
    for (size_t r = 0; r < ranks_.size(); ++r) {  // each rank decides for itself
      std::vector<Report> reports;
      for (const std::string& part : bytes) reports.push_back(decode(part));
      decision = decide_(reports);
      std::string text = "run";
      for (const std::string& identity : decision.run) text += " " + identity;
      for (const Refusal& refusal : decision.refuse)
        text += " refuse " + refusal.identity + refusal.message;
      text += " left " + decision.left;
      if (r == 0) first_text = text;
      if (text != first_text)
        return violate("ranks decide differently: " + first_text + " and " + text);
    }
    std::vector<std::string> refused;
    for (const Refusal& refusal : decision.refuse) refused.push_back(refusal.identity);
    serve(decision.run, refused);
    if (!decision.left.empty()) return stop(decision.left);
    if (decision.nothing() && all([](const Rank& rank) { return rank.settled(); }))
      violate("stuck");
  }

  void serve(const std::vector<std::string>& run, const std::vector<std::string>& refused) {
    for (const std::string& identity : refused) {
      const std::vector<Step> steps = take(identity, "refused");
      if (!violation_.empty()) return;
      const auto usual = [](const Step& step) { return step.signature == "usual"; };
      if (std::all_of(steps.begin(), steps.end(), usual))
        return violate("refuses equal signatures of " + identity);
      ++counts.refused;
    }
    for (const std::string& identity : run) {
      for (const Step& step : take(identity, "run")) {
        if (step.signature != "usual") violate("runs different signatures of " + identity);
      }
      if (!violation_.empty()) return;
      ++counts.run;
    }
  }

  // Each rank's first request of this identity.
  std::vector<Step> take(const std::string& identity, const std::string& fate) {
    std::vector<Step> steps;
    for (Rank& rank : ranks_) {
      const auto found = std::find_if(rank.queue.begin(), rank.queue.end(),
                                      [&](const Step& step) { return step.identity == identity; });
      if (found == rank.queue.end()) return violate(identity + " is not pending everywhere"), steps;
      steps.push_back(*found);
      rank.history.push_back(fate + " " + found->text());
      rank.queue.erase(found);
    }
    return steps;
  }

  void stop(const std::string& why) {
    stopped_ = true;
    ++counts.left;
    for (const Step& step : ranks_[0].queue) {
      const auto pending = [&](const Rank& rank) {
        return std::any_of(rank.queue.begin(), rank.queue.end(),
                           [&](const Step& other) { return other.identity == step.identity; });
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
    const int steps = static_cast<int>(ranks_[0].program.size());
    if (nobody_leaves_early_ && stopped_) return "stopped although no rank left before the end";
    if (nobody_leaves_early_ && counts.refused != odd_)
      return "does not refuse exactly what differs";
    if (nobody_leaves_early_ && counts.run != steps - odd_)
      return "does not run exactly what is equal";
    return "";
  }

  void violate(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }

  std::mt19937 random_;
  const Decide& decide_;
  std::vector<Rank> ranks_;
  bool nobody_leaves_early_ = true;
  int odd_ = 0;
  bool stopped_ = false;
  std::string violation_;
};

void every_schedule_ends_well() {
  const Decide real = decide;
  Counts total;
  int with_all = 0;
  for (unsigned seed = 0; seed < kSchedules; ++seed) {
    test::context = "seed " + std::to_string(seed);
    Schedule schedule(seed, real);
    CHECK_EQ(schedule.run(), "");
    const Counts& counts = schedule.counts;
    total.run += counts.run;
    total.refused += counts.refused;
    total.failed += counts.failed;
    total.left += counts.left;
    total.negotiated += counts.negotiated;
    total.unnegotiated += counts.unnegotiated;
    with_all +=
        counts.run && counts.refused && counts.failed && counts.negotiated && counts.unnegotiated;
  }
  test::context.clear();
  std::printf(
      "       %d run, %d refused, %d failed by %d leaving ranks; %d negotiations, %d without\n",
      total.run, total.refused, total.failed, total.left, total.negotiated, total.unnegotiated);
  // The schedules reach all there is, and often.
  for (int count :
       {total.run, total.refused, total.failed, total.left, total.negotiated, total.unnegotiated}) {
    CHECK(count > 1000);
  }
  CHECK(with_all > 10);
}

// Explores with a wrong decide(): the violations found, by seed.
void expect_found(const Decide& wrong, const std::string& wanted) {
  int found = 0;
  for (unsigned seed = 0; seed < kSchedules / 10; ++seed) {
    found += Schedule(seed, wrong).run().find(wanted) != std::string::npos;
  }
  test::context = "expected: " + wanted;
  CHECK(found > 0);
}

std::vector<Report> changed(std::vector<Report> reports,
                            const std::function<void(Report&)>& change) {
  for (Report& report : reports) change(report);
  return reports;
}

void finds_that_signatures_are_ignored() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) {
          for (Pending& pending : report.queue) pending.signature.clear();
        }));
      },
      "runs different signatures");
}

void finds_that_leaving_is_ignored() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) { report.leaving = false; }));
      },
      "stuck");
}

void finds_that_refusals_are_lost() {
  expect_found(
      [](const std::vector<Report>& reports) {
        Decision decision = decide(reports);
        decision.refuse.clear();
        return decision;
      },
      "stuck");
}

void finds_that_later_duplicates_are_compared() {
  const Decide wrong = [](const std::vector<Report>& reports) {
    return decide(changed(
        reports, [](Report& report) { std::reverse(report.queue.begin(), report.queue.end()); }));
  };
  expect_found(wrong, "runs different signatures");
  expect_found(wrong, "refuses equal signatures");
}

void finds_that_ranks_order_differently() {
  bool odd = false;
  expect_found(
      [&odd](const std::vector<Report>& reports) {
        Decision decision = decide(reports);
        if ((odd = !odd)) std::reverse(decision.run.begin(), decision.run.end());
        return decision;
      },
      "ranks decide differently");
}

void finds_that_a_rank_is_forgotten() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(std::vector<Report>(reports.begin(), reports.end() - 1));
      },
      "is not pending everywhere");
}

void finds_that_leaving_comes_first() {
  expect_found(
      [](const std::vector<Report>& reports) {
        Decision decision;
        for (size_t r = 0; r < reports.size(); ++r) {
          if (reports[r].leaving) decision.left += "reason " + std::to_string(r) + " ";
        }
        return decision.left.empty() ? decide(reports) : decision;
      },
      "fails what can be served");
}

void finds_that_leaving_comes_too_early() {
  expect_found(
      [](const std::vector<Report>& reports) {
        Decision decision = decide(reports);
        if (decision.nothing()) decision.left = "impatience";
        return decision;
      },
      "stops although no rank has left");
}

}  // namespace
}  // namespace hvd

int main() {
  using namespace hvd;
  return test::run({
      {"every schedule ends well", every_schedule_ends_well},
      {"finds that signatures are ignored", finds_that_signatures_are_ignored},
      {"finds that leaving is ignored", finds_that_leaving_is_ignored},
      {"finds that refusals are lost", finds_that_refusals_are_lost},
      {"finds that later duplicates are compared", finds_that_later_duplicates_are_compared},
      {"finds that ranks order differently", finds_that_ranks_order_differently},
      {"finds that a rank is forgotten", finds_that_a_rank_is_forgotten},
      {"finds that leaving comes first", finds_that_leaving_comes_first},
      {"finds that leaving comes too early", finds_that_leaving_comes_too_early},
  });
}
