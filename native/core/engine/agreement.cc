#include "core/engine/agreement.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "core/base/bytes.h"

namespace hvd {
namespace {

using Row = Digest::Row;

// Of what has failed, at most so much is refused at once.
constexpr size_t kMostFailed = 64;

void sort(std::vector<Row>* rows) {
  std::sort(rows->begin(), rows->end(), [](const Row& a, const Row& b) {
    return std::tie(a.owner, a.place) < std::tie(b.owner, b.place);
  });
}

// One row of two.
Row both(Row row, Row other) {
  if (other.owner < row.owner) std::swap(row, other);
  row.differs |= other.differs || row.signature != other.signature;
  row.has_problem |= other.has_problem;
  row.lacks |= other.lacks;
  row.has_needed |= other.has_needed;
  return row;
}

}  // namespace

uint64_t hash_of(const std::string& text) {
  Hash hash;
  hash.add(text);
  return hash.value();
}

bool Report::joined() const {
  return std::any_of(queue.begin(), queue.end(),
                     [](const Pending& pending) { return pending.joins; });
}

std::unordered_map<uint64_t, const Pending*> heads(const Report& report) {
  std::unordered_map<uint64_t, const Pending*> heads;
  for (const Pending& pending : report.queue) heads.emplace(hash_of(pending.identity), &pending);
  return heads;
}

Digest::Digest(const Report& report)
    : leaving(report.leaving),
      warns(report.warns),
      absent(report.joined() ? -1 : report.number),
      newly_joined(report.joined() && !report.had_joined ? report.number : -1),
      unchanged(report.queue.empty() ? 0 : report.unchanged),
      waited(report.waited) {
  for (const auto& [identity, pending] : heads(report)) {
    if (leaving) left.push_back(identity);
    if (pending->joins) continue;
    if (pending->failed) failed.push_back(identity);
    Row& row = rows.emplace_back();
    row.identity = identity;
    row.signature = hash_of(pending->signature);
    row.owner = report.number;
    row.place = static_cast<int>(pending - report.queue.data());
    row.needs = pending->needs;
    row.has_problem = !pending->problem.empty();
    row.has_needed = pending->needs == report.rank;
  }
  sort(&rows);
  std::sort(failed.begin(), failed.end());
  std::sort(left.begin(), left.end());
}

void Digest::add(const Digest& other) {
  std::unordered_map<uint64_t, const Row*> theirs;
  for (const Row& row : other.rows) theirs.emplace(row.identity, &row);
  std::vector<Row> common;
  for (Row& row : rows) {
    const auto found = theirs.find(row.identity);
    if (found != theirs.end()) {
      common.push_back(both(row, *found->second));
      theirs.erase(found);
    } else if (other.absent < 0) {
      common.push_back(row);
      common.back().lacks = true;
    }
  }
  for (const auto& their : theirs) {
    if (absent >= 0) break;
    common.push_back(*their.second);
    common.back().lacks = true;
  }
  sort(&common);
  rows = std::move(common);

  std::vector<uint64_t> merged;
  std::set_union(failed.begin(), failed.end(), other.failed.begin(), other.failed.end(),
                 std::back_inserter(merged));
  if (merged.size() > kMostFailed) merged.resize(kMostFailed);
  failed = std::move(merged);

  if (leaving && other.leaving) {
    std::vector<uint64_t> of_both;
    std::set_intersection(left.begin(), left.end(), other.left.begin(), other.left.end(),
                          std::back_inserter(of_both));
    left = std::move(of_both);
  } else if (other.leaving) {
    left = other.left;
  }
  leaving |= other.leaving;
  warns |= other.warns;
  absent = std::max(absent, other.absent);
  newly_joined = std::max(newly_joined, other.newly_joined);
  unchanged = std::min(unchanged, other.unchanged);
  waited = std::max(waited, other.waited);
}

Code Refusal::code() const {
  return why == problem  ? Code::invalid_argument
         : why == failed ? Code::aborted
                         : Code::failed_precondition;
}

Decision decide(const Digest& all) {
  Decision decision;
  for (const Row& row : all.rows) {
    const auto refuse = [&](Refusal::Why why) {
      decision.refuse.push_back({row.identity, why, row.needs});
    };
    if (row.has_problem) {
      refuse(Refusal::problem);
    } else if (row.differs) {
      refuse(Refusal::differs);
    } else if (row.lacks && row.needs != Pending::nobody && !row.has_needed) {
      refuse(Refusal::lacks);
    } else {
      decision.run.push_back({row.identity, row.owner});
      decision.some_joined |= row.lacks;
    }
  }
  for (uint64_t identity : all.failed) {
    const auto same = [&](const Row& row) { return row.identity == identity; };
    if (std::none_of(all.rows.begin(), all.rows.end(), same))
      decision.refuse.push_back({identity, Refusal::failed});
  }
  decision.needs_texts =
      !decision.refuse.empty() || decision.some_joined || all.warns ||
      (decision.run.empty() && (all.leaving || all.unchanged > 0 || all.waited > 0));
  return decision;
}

}  // namespace hvd
