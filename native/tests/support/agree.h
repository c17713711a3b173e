// What the engines of some ranks decide together: their reports and texts are combined as bytes,
// pairwise, those of few ranks in random order. Requests have their names.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/engine/agreement.h"
#include "core/engine/texts.h"

namespace hvd::test {

struct Decided {
  struct Step {
    std::string identity, header;
  };
  struct Refused {
    std::string identity;
    Code code;
    std::string message;
  };
  std::vector<Step> run;
  std::vector<Refused> refuse;
  std::string mismatch, left, stuck, summary;

  bool nothing() const {
    return run.empty() && refuse.empty() && mismatch.empty() && left.empty() && stuck.empty();
  }
};

template <typename T>
T through_bytes(const T& part) {
  return decode<T>(encode(part));
}

template <typename T>
T combined(std::vector<T> parts, std::mt19937& random) {
  if (parts.size() < 16) std::shuffle(parts.begin(), parts.end(), random);
  for (size_t width = 1; width < parts.size(); width *= 2) {
    for (size_t i = 0; i + width < parts.size(); i += 2 * width) {
      T one = through_bytes(parts[i]), other = through_bytes(parts[i + width]);
      if (random() % 2) std::swap(one, other);
      one.add(other);
      parts[i] = one;
    }
  }
  return through_bytes(parts[0]);
}

inline Decided decide(std::vector<Report> reports) {
  static unsigned seed = 0;
  std::mt19937 random(++seed);
  std::map<uint64_t, std::string> names;
  std::vector<Digest> digests;
  for (size_t r = 0; r < reports.size(); ++r) {
    reports[r].number = static_cast<int>(r);
    digests.emplace_back(reports[r]);
    for (const Pending& pending : reports[r].queue)
      names[hash_of(pending.identity)] = pending.identity;
  }
  const Digest all = combined(digests, random);
  Decision decision = hvd::decide(all);
  if (decision.needs_texts) {
    std::vector<Texts> texts;
    for (const Report& report : reports) texts.emplace_back(decision, all, report);
    explain(all, combined(texts, random), &decision);
  }
  Decided decided{{}, {}, decision.mismatch, decision.left, decision.stuck, decision.summary};
  for (const Step& step : decision.run) decided.run.push_back({names[step.identity], step.header});
  for (const Refusal& refusal : decision.refuse)
    decided.refuse.push_back({names[refusal.identity], refusal.code(), refusal.message});
  return decided;
}

}  // namespace hvd::test
