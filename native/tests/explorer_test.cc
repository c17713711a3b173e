// Explores the agreement: random programs on 2 to 4 ranks, random speeds, ranks that join, leave
// early, or never submit what the others wait for. Every schedule must end on all ranks alike, each
// request run, refused, or failed by who left or by the deadline.
#include "tests/support/explorer.h"

namespace hvd {
namespace {

using test::Counts;
using test::decide;
using test::Decide;
using Decision = test::Decided;
using test::Schedule;

constexpr unsigned kSchedules = 20000;

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
    total.stood_in += counts.stood_in;
    total.mismatched += counts.mismatched;
    total.stuck += counts.stuck;
    total.left += counts.left;
    total.negotiated += counts.negotiated;
    total.unnegotiated += counts.unnegotiated;
    with_all +=
        counts.run && counts.refused && counts.failed && counts.negotiated && counts.unnegotiated;
  }
  test::context.clear();
  std::printf(
      "       %d run, %d of them without ranks that had joined, %d refused, %d failed by %d "
      "leaving ranks, %d mismatches, %d given up; %d negotiations, %d without\n",
      total.run, total.stood_in, total.refused, total.failed, total.left, total.mismatched,
      total.stuck, total.negotiated, total.unnegotiated);
  // The schedules reach all there is, and often.
  for (int count : {total.run, total.stood_in, total.refused, total.failed, total.left,
                    total.negotiated, total.unnegotiated}) {
    CHECK(count > 1000);
  }
  CHECK(total.stuck > 10);
  CHECK(total.mismatched > 10);
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
      "gives up although");
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

void finds_that_problems_are_ignored() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) {
          for (Pending& pending : report.queue) pending.problem.clear();
        }));
      },
      "runs what has a problem");
}

void finds_that_joining_is_an_ordinary_request() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) {
          for (Pending& pending : report.queue) pending.joins = false;
        }));
      },
      "gives up although");
}

void finds_that_joining_does_not_wait_for_all() {
  expect_found(
      [](const std::vector<Report>& reports) {
        Decision decision = decide(reports);
        if (decision.nothing() && reports[0].joined()) decision.run.push_back({"join", "join#0"});
        return decision;
      },
      "is not pending everywhere");
}

void finds_that_a_needed_rank_is_stood_in_for() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) {
          for (Pending& pending : report.queue) pending.needs = Pending::nobody;
        }));
      },
      "does not refuse exactly what differs");
}

void finds_that_nobody_ever_gives_up() {
  expect_found(
      [](const std::vector<Report>& reports) {
        Decision decision = decide(reports);
        decision.stuck.clear();
        decision.mismatch.clear();
        return decision;
      },
      "stuck");
}

void finds_that_a_mismatch_is_called_too_early() {
  expect_found(
      [](const std::vector<Report>& reports) {
        return decide(changed(reports, [](Report& report) { report.unchanged = 21; }));
      },
      "gives up although");
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
      {"finds that problems are ignored", finds_that_problems_are_ignored},
      {"finds that joining is an ordinary request", finds_that_joining_is_an_ordinary_request},
      {"finds that joining does not wait for all", finds_that_joining_does_not_wait_for_all},
      {"finds that a needed rank is stood in for", finds_that_a_needed_rank_is_stood_in_for},
      {"finds that nobody ever gives up", finds_that_nobody_ever_gives_up},
      {"finds that a mismatch is called too early", finds_that_a_mismatch_is_called_too_early},
  });
}
