#include "core/engine/texts.h"

#include <algorithm>
#include <map>
#include <optional>

namespace hvd {
namespace {

// So many requests of a queue.
constexpr size_t kShownOfQueue = 5;

using Group = Said::Group;

// What a rank says to a refusal, beside the request's identity.
std::optional<std::string> version(const Refusal& refusal, const Pending* pending) {
  switch (refusal.why) {
    case Refusal::problem:
      if (pending && !pending->problem.empty()) return pending->problem;
      break;
    case Refusal::differs:
      return pending ? pending->signature : "has joined";
    case Refusal::lacks:
      if (!pending) return "";
      break;
    case Refusal::failed:
      if (pending && pending->failed) return "";
  }
  return {};
}

std::string queue_of(const Report& report) {
  std::string text = "submitted: ";
  const auto& queue = report.queue;
  for (size_t i = 0; i < queue.size() && i < kShownOfQueue; ++i)
    text += (i ? ", " : "") + queue[i].identity;
  if (queue.size() > kShownOfQueue)
    text += " and " + std::to_string(queue.size() - kShownOfQueue) + " more";
  return text;
}

std::string name(int rank) { return "rank " + std::to_string(rank); }

// A line for each rank, or for each group of many. `between`: a name and a text.
std::vector<std::string> lines(const Said& said, const std::string& between,
                               const std::string& of_many) {
  std::vector<std::string> lines;
  if (said.count <= kShownRanks) {
    std::map<int, const std::string*> of_rank;
    for (const Group& group : said.groups)
      for (const auto& [first, last] : group.ranks)
        for (int r = first; r <= last; ++r) of_rank[r] = &group.text;
    for (const auto& [rank, text] : of_rank) lines.push_back(name(rank) + between + *text);
    return lines;
  }
  uint64_t others = said.count;
  for (const Group& group : said.groups) {
    others -= group.count;
    lines.push_back(names(group) + (group.count == 1 ? between : of_many) + group.text);
  }
  if (others > 0) lines.push_back("and " + std::to_string(others) + " other ranks");
  return lines;
}

std::string listed(const Said& said, const std::string& between, const std::string& of_many) {
  std::string text;
  for (const std::string& line : lines(said, between, of_many)) text += "\n  " + line;
  return text;
}

std::string message(const Refusal& refusal, const std::string& identity, const Said& versions) {
  switch (refusal.why) {
    case Refusal::problem:
      return identity + " cannot run:" + listed(versions, ": ", ": ");
    case Refusal::differs:
      return identity + " differs between ranks:" + listed(versions, ": ", ": ") +
             "\nEvery rank must call it with the same dtype, shape, op, root and scale factors.";
    case Refusal::lacks:
      return identity + " cannot run without " +
             name(refusal.needs >= 0 ? refusal.needs : versions.groups[0].ranks[0].first) +
             ", which has joined (hvd.join) and submits nothing more.";
    case Refusal::failed:
      break;
  }
  return identity + " cannot run: another op of the same step has failed on " +
         name(versions.groups[0].ranks[0].first) + ", and not all ranks have submitted it.";
}

}  // namespace

void Group::add(int first, int last) {
  count += last - first + 1;
  if (!ranks.empty() && ranks.back().second + 1 == first)
    ranks.back().second = last;
  else if (ranks.size() < kShownRanks)
    ranks.emplace_back(first, last);
}

std::string names(const Group& group) {
  uint64_t more = group.count;
  std::string text;
  for (const auto& [first, last] : group.ranks) {
    more -= last - first + 1;
    text += (text.empty() ? "" : ", ") + std::to_string(first) +
            (first < last ? "-" + std::to_string(last) : "");
  }
  if (more > 0) text += " and " + std::to_string(more) + " more";
  return (group.count == 1 ? "rank " : "ranks ") + text;
}

void Said::add(const Said& other) {
  for (const Group& theirs : other.groups) {
    const auto found = std::find_if(groups.begin(), groups.end(),
                                    [&](const Group& group) { return group.text == theirs.text; });
    if (found == groups.end()) {
      groups.push_back(theirs);
      continue;
    }
    auto all = found->ranks;
    all.insert(all.end(), theirs.ranks.begin(), theirs.ranks.end());
    std::sort(all.begin(), all.end());
    found->ranks.clear();
    const uint64_t of_both = found->count + theirs.count;
    for (const auto& [first, last] : all) found->add(first, last);
    found->count = of_both;
  }
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return a.ranks[0] < b.ranks[0]; });
  if (groups.size() > kShownRanks) groups.resize(kShownRanks);
  count += other.count;
}

Texts::Texts(const Decision& decision, const Digest& all, const Report& mine) {
  const auto own = heads(mine);
  const auto say = [&](const std::optional<std::string>& text) {
    Said& said = matters.emplace_back();
    if (!text) return;
    said.groups.push_back({*text, {{mine.rank, mine.rank}}, 1});
    said.count = 1;
  };
  const auto find = [&](uint64_t identity) {
    const auto found = own.find(identity);
    return found == own.end() ? nullptr : found->second;
  };
  for (const Refusal& refusal : decision.refuse) {
    const Pending* const pending = find(refusal.identity);
    say(pending ? std::optional(pending->identity) : std::nullopt);
    say(version(refusal, pending));
  }
  for (const Step& step : decision.run) {
    const bool shares = decision.some_joined && step.owner == mine.number;
    say(shares ? std::optional(find(step.identity)->header) : std::nullopt);
  }
  // Whether it waits for what a rank that has left did not submit.
  const bool waits = std::any_of(own.begin(), own.end(), [&](const auto& head) {
    return !std::binary_search(all.left.begin(), all.left.end(), head.first);
  });
  say(all.leaving && waits ? std::optional<std::string>("") : std::nullopt);
  say(mine.leaving ? std::optional(mine.reason + " (on " + mine.host + ")") : std::nullopt);
  say(queue_of(mine));
}

void Texts::add(const Texts& other) {
  for (size_t i = 0; i < matters.size(); ++i) matters[i].add(other.matters[i]);
}

void explain(const Digest& all, const Texts& texts, Decision* decision) {
  auto said = texts.matters.begin();
  for (Refusal& refusal : decision->refuse) {
    const std::string identity = said++->groups[0].text;
    refusal.message = message(refusal, identity, *said++);
  }
  for (Step& step : decision->run) {
    if (decision->some_joined) step.header = said->groups[0].text;
    ++said;
  }
  const Said &waiting = *said++, &leaving = *said++;
  decision->summary = listed(*said, " has ", " have ");
  if (!decision->nothing()) return;
  const auto seconds = [](double time) {
    return std::to_string(static_cast<int64_t>(time)) + " s";
  };
  if (waiting.count > 0) {
    for (const std::string& line : lines(leaving, " has ", " have "))
      decision->left += (decision->left.empty() ? "" : "; ") + line;
  } else if (all.unchanged > 0) {
    decision->mismatch =
        "the ranks wait for different collectives, and none has called another for " +
        seconds(all.unchanged) + " (HVD_MISMATCH_SECONDS):" + decision->summary +
        "\nMost often the ranks have different numbers of batches: give all the same number with "
        "hvd.data.shard or hvd.data.agree_on_steps. Or they took different branches: all ranks "
        "must call the same collectives.";
  } else if (all.waited > 0) {
    decision->stuck = "no progress for " + seconds(all.waited) +
                      ": the ranks wait for different collectives:" + decision->summary;
  }
}

}  // namespace hvd
