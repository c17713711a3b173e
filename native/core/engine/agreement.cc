#include "core/engine/agreement.h"

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_map>

#include "core/base/bytes.h"

namespace hvd {
namespace {

// The first request of each identity; a later one with the same identity waits for its turn.
using Heads = std::unordered_map<std::string, const Pending*>;

// What ranks send, for a Writer or a Reader: of a request, and of a report before its queue.
template <typename Bytes, typename P>
void fields(Bytes& bytes, P& pending) {
  bytes(pending.identity, pending.signature, pending.problem, pending.header, pending.joins,
        pending.failed, pending.needs);
}
template <typename Bytes, typename R>
void head(Bytes& bytes, R& report) {
  bytes(report.rank, report.host, report.leaving, report.warns, report.reason, report.unchanged,
        report.waited);
}

std::string name(const Report& report) { return "rank " + std::to_string(report.rank); }

// One identity, on all ranks.
struct Row {
  std::vector<const Pending*> pending;  // by rank; null: this rank has not submitted it
  const Pending* first;                 // of those that have
  int owner;                            // its rank

  bool complete(const std::vector<Report>& reports) const {
    for (size_t r = 0; r < reports.size(); ++r) {
      if (!pending[r] && !reports[r].joined()) return false;
    }
    return true;
  }
};

Row row_of(const std::string& identity, const std::vector<Heads>& heads) {
  Row row{{}, nullptr, 0};
  for (const Heads& own : heads) {
    const auto found = own.find(identity);
    row.pending.push_back(found == own.end() ? nullptr : found->second);
    if (row.first) continue;
    row.first = row.pending.back();
    row.owner = static_cast<int>(row.pending.size()) - 1;
  }
  return row;
}

// Why a complete row cannot run; its message is empty if it can.
Refusal refusal(const Row& row, const std::vector<Report>& reports) {
  Refusal refusal{row.first->identity, Code::invalid_argument, ""};
  for (size_t r = 0; r < reports.size(); ++r) {
    const Pending* pending = row.pending[r];
    if (pending && !pending->problem.empty())
      refusal.message += "\n  " + name(reports[r]) + ": " + pending->problem;
  }
  if (!refusal.message.empty()) {
    refusal.message = row.first->identity + " cannot run:" + refusal.message;
    return refusal;
  }
  refusal.code = Code::failed_precondition;
  const auto differs = [&](const Pending* pending) {
    return pending && pending->signature != row.first->signature;
  };
  if (std::any_of(row.pending.begin(), row.pending.end(), differs)) {
    refusal.message = row.first->identity + " differs between ranks:";
    for (size_t r = 0; r < reports.size(); ++r) {
      refusal.message += "\n  " + name(reports[r]) + ": " +
                         (row.pending[r] ? row.pending[r]->signature : "has joined");
    }
    refusal.message +=
        "\nEvery rank must call it with the same dtype, shape, op, root and scale factors.";
    return refusal;
  }
  for (size_t r = 0; r < reports.size(); ++r) {
    if (row.pending[r]) continue;
    if (row.first->needs == Pending::everybody || row.first->needs == reports[r].rank) {
      refusal.message = row.first->identity + " cannot run without " + name(reports[r]) +
                        ", which has joined (hvd.join) and submits nothing more.";
      break;
    }
  }
  return refusal;
}

// Why a row that is not complete will never be; empty if it may.
std::string failure(const Row& row, const std::vector<Report>& reports) {
  for (size_t r = 0; r < reports.size(); ++r) {
    if (!row.pending[r] || !row.pending[r]->failed) continue;
    return row.first->identity + " cannot run: another op of the same step has failed on " +
           name(reports[r]) + ", and not all ranks have submitted it.";
  }
  return "";
}

// Whether a rank waits for a request that a rank that has left did not submit.
bool somebody_waits_for_a_rank_that_left(const std::vector<Report>& reports,
                                         const std::vector<Heads>& heads) {
  for (size_t r = 0; r < reports.size(); ++r) {
    if (!reports[r].leaving) continue;
    for (const Heads& other : heads) {
      for (const auto& head : other) {
        if (heads[r].count(head.first) == 0) return true;
      }
    }
  }
  return false;
}

std::string who_left(const std::vector<Report>& reports) {
  std::string text;
  for (const Report& report : reports) {
    if (!report.leaving) continue;
    if (!text.empty()) text += "; ";
    text += name(report) + " has left the job: " + report.reason + " (on " + report.host + ")";
  }
  return text;
}

// Seconds since any rank's queue changed, if all have requests and it is a long time; otherwise 0.
double unchanged_seconds(const std::vector<Report>& reports) {
  double least = std::numeric_limits<double>::infinity();
  for (const Report& report : reports)
    least = std::min(least, report.queue.empty() ? 0 : report.unchanged);
  return least;
}

}  // namespace

bool Report::joined() const {
  return std::any_of(queue.begin(), queue.end(),
                     [](const Pending& pending) { return pending.joins; });
}

Decision decide(const std::vector<Report>& reports) {
  std::vector<Heads> heads(reports.size());
  for (size_t r = 0; r < reports.size(); ++r) {
    for (const Pending& pending : reports[r].queue) heads[r].emplace(pending.identity, &pending);
  }

  Decision decision;
  std::set<std::string> seen;
  for (const Report& report : reports) {
    for (const Pending& pending : report.queue) {
      if (pending.joins || !seen.insert(pending.identity).second) continue;
      const Row row = row_of(pending.identity, heads);
      if (!row.complete(reports)) {
        if (std::string why = failure(row, reports); !why.empty())
          decision.refuse.push_back({pending.identity, Code::aborted, std::move(why)});
        continue;
      }
      Refusal refused = refusal(row, reports);
      if (!refused.message.empty()) {
        decision.refuse.push_back(std::move(refused));
      } else {
        decision.run.push_back({pending.identity, row.first->header, row.owner});
        decision.some_joined |= std::count(row.pending.begin(), row.pending.end(), nullptr) > 0;
      }
    }
  }
  if (!decision.nothing()) return decision;
  if (somebody_waits_for_a_rank_that_left(reports, heads)) {
    decision.left = who_left(reports);
    return decision;
  }
  if (const double seconds = unchanged_seconds(reports); seconds > 0) {
    decision.mismatch =
        "the ranks wait for different collectives, and none has called another for " +
        std::to_string(static_cast<int64_t>(seconds)) +
        " s (HVD_MISMATCH_SECONDS):" + summary(reports) +
        "\nMost often the ranks have different numbers of batches: give all the same number with "
        "hvd.data.shard or hvd.data.agree_on_steps. Or they took different branches: all ranks "
        "must call the same collectives.";
    return decision;
  }
  double waited = 0;
  for (const Report& report : reports) waited = std::max(waited, report.waited);
  if (waited > 0) {
    decision.stuck = "no progress for " + std::to_string(static_cast<int64_t>(waited)) +
                     " s: the ranks wait for different collectives:" + summary(reports);
  }
  return decision;
}

std::string brief_identity(const std::string& identity) {
  Hash hash;
  hash.add(identity);
  Writer out;
  out(hash.value());
  return out.take();
}

Report brief(Report report) {
  report.host.clear();
  report.reason.clear();
  for (Pending& pending : report.queue) {
    pending.identity = brief_identity(pending.identity);
    pending.signature = brief_identity(pending.signature);
    pending.problem.resize(std::min<size_t>(pending.problem.size(), 1));
    pending.header.clear();
  }
  return report;
}

bool needs_texts(const Decision& decision, const std::vector<Report>& reports) {
  const auto warns = [](const Report& report) { return report.warns; };
  const Decision& d = decision;
  return !d.refuse.empty() || !d.mismatch.empty() || !d.left.empty() || !d.stuck.empty() ||
         std::any_of(reports.begin(), reports.end(), warns);
}

std::string summary(const std::vector<Report>& reports) {
  constexpr size_t kShown = 5;
  std::string text;
  for (const Report& report : reports) {
    text += "\n  " + name(report) + " has submitted: ";
    const auto& queue = report.queue;
    for (size_t i = 0; i < queue.size() && i < kShown; ++i) {
      text += (i ? ", " : "") + queue[i].identity;
    }
    if (queue.size() > kShown) text += " and " + std::to_string(queue.size() - kShown) + " more";
  }
  return text;
}

std::string encode(const Report& report) {
  Writer out;
  head(out, report);
  for (const Pending& pending : report.queue) fields(out, pending);
  return out.take();
}

Report decode(const std::string& bytes) {
  Reader in(bytes);
  Report report;
  head(in, report);
  while (!in.at_end()) fields(in, report.queue.emplace_back());
  return report;
}

}  // namespace hvd
