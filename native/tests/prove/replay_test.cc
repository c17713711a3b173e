// Replays the negotiations that the model of the agreement (agreement.pml) prints: decide() must
// decide the same. Reads them from stdin:
//
//   negotiation 130010 200000 0 : run 1 refuse 2
//
// For each rank three requests, its signature, whether it leaves, whether its queue is unchanged
// for long; then whether one has waited for too long.
#include <iostream>
#include <set>
#include <sstream>

#include "tests/support/agree.h"
#include "tests/support/check.h"

namespace hvd {
namespace {

constexpr int kA = 1, kJoin = 3;
const char* const kNames[] = {"", "allreduce 'A'", "allreduce 'B'", "join"};

Pending pending(int request, char signature) {
  Pending pending;
  pending.identity = kNames[request];
  pending.signature = request == kA ? std::string(1, signature) : "same";
  pending.joins = request == kJoin;
  return pending;
}

std::vector<Report> reports_of(std::istream& line) {
  std::vector<Report> reports;
  std::string rank;
  while (line >> rank && rank.size() == 6) {
    Report report;
    report.rank = static_cast<int>(reports.size());
    for (int i = 0; i < 3 && rank[i] != '0'; ++i)
      report.queue.push_back(pending(rank[i] - '0', rank[3]));
    report.leaving = rank[4] == '1';
    report.unchanged = rank[5] == '1' ? 30 : 0;
    reports.push_back(report);
  }
  reports[0].waited = rank == "1" ? 700 : 0;
  return reports;
}

// As the model prints it.
std::string decided(const std::vector<Report>& reports) {
  const test::Decided decision = test::decide(reports);
  const auto number = [&](const std::string& identity) {
    int number = 1;
    while (identity != kNames[number]) ++number;
    return " " + std::to_string(number);
  };
  std::string text;
  for (const auto& step : decision.run) text += " run" + number(step.identity);
  for (const auto& refusal : decision.refuse) text += " refuse" + number(refusal.identity);
  if (!decision.left.empty()) text += " left";
  if (!decision.mismatch.empty()) text += " mismatch";
  if (!decision.stuck.empty()) text += " stuck";
  return text;
}

TEST(decide_decides_like_the_model) {
  std::set<std::string> lines, decisions;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.rfind("negotiation", 0) != 0 || !lines.insert(line).second) continue;
    test::context = line;
    const size_t colon = line.find(':');
    const std::string expected = line.substr(colon + 1);
    std::istringstream words(line.substr(0, colon));
    std::string first;
    words >> first;
    CHECK_EQ(decided(reports_of(words)), expected);
    decisions.insert(expected);
  }
  test::context.clear();
  std::printf("       %zu negotiations, %zu decisions\n", lines.size(), decisions.size());
  CHECK(lines.size() > 100);
  for (const char* decision : {"", " run 1", " run 2 run 1", " refuse 1", " run 2 refuse 1",
                               " left", " mismatch", " stuck"})
    CHECK(decisions.count(decision) == 1);
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
