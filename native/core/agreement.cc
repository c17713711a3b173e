#include "core/agreement.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

namespace hvd {
namespace {

void put(std::string& out, const std::string& text) {
  const uint64_t size = text.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(text);
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  bool at_end() const { return position_ == bytes_.size(); }

  std::string text() {
    uint64_t size;
    take(sizeof size, &size);
    std::string text(size, '\0');
    take(size, text.data());
    return text;
  }

 private:
  void take(size_t size, void* out) {
    if (bytes_.size() - position_ < size) throw std::runtime_error("a rank's report is cut short");
    std::memcpy(out, bytes_.data() + position_, size);
    position_ += size;
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

// The first request of each identity; a later one with the same identity waits for its turn.
using Heads = std::unordered_map<std::string, const Pending*>;

// Whether somebody waits for a request that a rank that has left can no longer submit.
bool somebody_waits_in_vain(const std::vector<Report>& reports, const std::vector<Heads>& heads) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].leaving) continue;
    for (const Heads& other : heads) {
      for (const auto& head : other) {
        if (heads[rank].count(head.first) == 0) return true;
      }
    }
  }
  return false;
}

std::string who_left(const std::vector<Report>& reports) {
  std::string text;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].leaving) continue;
    if (!text.empty()) text += "; ";
    text += "rank " + std::to_string(rank) + " has left the job: " + reports[rank].reason;
  }
  return text;
}

std::string disagreement(const std::string& identity, const std::vector<Heads>& heads) {
  std::string text = identity + " differs between ranks:";
  for (size_t rank = 0; rank < heads.size(); ++rank) {
    text += "\n  rank " + std::to_string(rank) + ": " + heads[rank].at(identity)->signature;
  }
  return text + "\nEvery rank must call it with the same dtype, shape, op, root and scale factors.";
}

}  // namespace

Decision decide(const std::vector<Report>& reports) {
  std::vector<Heads> heads(reports.size());
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    for (const Pending& pending : reports[rank].queue)
      heads[rank].emplace(pending.identity, &pending);
  }

  Decision decision;
  for (const Pending& pending : reports[0].queue) {
    if (heads[0].at(pending.identity) != &pending) continue;
    bool everywhere = true;
    bool equal = true;
    for (const Heads& other : heads) {
      const auto found = other.find(pending.identity);
      if (found == other.end()) {
        everywhere = false;
        break;
      }
      equal = equal && found->second->signature == pending.signature;
    }
    if (!everywhere) continue;
    if (equal) {
      decision.run.push_back(pending.identity);
    } else {
      decision.refuse.push_back({pending.identity, disagreement(pending.identity, heads)});
    }
  }
  if (decision.nothing() && somebody_waits_in_vain(reports, heads))
    decision.left = who_left(reports);
  return decision;
}

std::string summary(const std::vector<Report>& reports) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    text += "\n  rank " + std::to_string(rank) + " has submitted: ";
    const auto& queue = reports[rank].queue;
    for (size_t i = 0; i < queue.size() && i < kShown; ++i) {
      text += (i ? ", " : "") + queue[i].identity;
    }
    if (queue.size() > kShown) text += " and " + std::to_string(queue.size() - kShown) + " more";
  }
  return text;
}

std::string encode(const Report& report) {
  std::string out;
  put(out, report.leaving ? "leaving" : "");
  put(out, report.reason);
  for (const Pending& pending : report.queue) {
    put(out, pending.identity);
    put(out, pending.signature);
  }
  return out;
}

Report decode(const std::string& bytes) {
  Reader reader(bytes);
  Report report;
  report.leaving = !reader.text().empty();
  report.reason = reader.text();
  while (!reader.at_end()) {
    std::string identity = reader.text();
    report.queue.push_back({std::move(identity), reader.text()});
  }
  return report;
}

}  // namespace hvd
