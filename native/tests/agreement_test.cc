// decide() on cases written by hand, in every order of combination. prove/ and simulate/ try what
// nobody would write.
#include "core/engine/agreement.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/agree.h"
#include "tests/support/check.h"

namespace hvd {
namespace {

struct Call {
  std::string identity, signature;
  std::string problem = "";
  int needs = Pending::nobody;
};

Report staying(const std::vector<Call>& calls) {
  Report report;
  for (const Call& call : calls) {
    report.queue.push_back({call.identity, call.signature, call.problem, "header " + call.identity,
                            call.identity == "join", call.needs});
  }
  return report;
}

Report leaving(std::string reason, const std::vector<Call>& calls) {
  Report report = staying(calls);
  report.leaving = true;
  report.reason = "left the job: " + std::move(reason);
  return report;
}

using Decision = test::Decided;

template <typename Steps>
std::string identities(const Steps& steps) {
  std::string text;
  for (const auto& step : steps) text += (text.empty() ? "" : " ") + step.identity;
  return text;
}

// Each rank knows its number, and its host.
Decision decide(std::vector<Report> reports) {
  for (size_t r = 0; r < reports.size(); ++r) {
    reports[r].rank = static_cast<int>(r);
    reports[r].host = "host" + std::to_string(r);
  }
  const Decision decision = test::decide(reports);
  for (int i = 0; i < 20; ++i) {
    const Decision other = test::decide(reports);
    CHECK_EQ(identities(other.run), identities(decision.run));
    CHECK_EQ(identities(other.refuse), identities(decision.refuse));
    CHECK_EQ(other.mismatch + other.left + other.stuck + other.summary,
             decision.mismatch + decision.left + decision.stuck + decision.summary);
  }
  return decision;
}

std::string joined(const std::vector<Decision::Step>& steps) { return identities(steps); }
std::string refused(const Decision& decision) { return identities(decision.refuse); }

TEST(equal_requests_run_in_the_order_of_rank_0) {
  const Decision decision = decide({staying({{"b", "1"}, {"x", "1"}, {"a", "2"}, {"c", "3"}}),
                                    staying({{"c", "3"}, {"a", "2"}, {"y", "1"}, {"b", "1"}}),
                                    staying({{"a", "2"}, {"c", "3"}, {"b", "1"}, {"x", "1"}})});
  CHECK_EQ(joined(decision.run), "b a c");
  CHECK_EQ(refused(decision), "");
  CHECK_EQ(decision.left, "");
  CHECK(!decision.nothing());
}

TEST(different_signatures_are_refused_with_every_ranks) {
  const Decision decision = decide({staying({{"a", "float32[2]"}, {"b", "same"}}),
                                    staying({{"b", "same"}, {"a", "float32[3]"}}),
                                    staying({{"a", "float32[2]"}, {"b", "same"}})});
  CHECK_EQ(joined(decision.run), "b");
  CHECK_EQ(refused(decision), "a");
  CHECK(!decision.nothing());
  if (decision.refuse.size() != 1) return;
  CHECK_CONTAINS(decision.refuse[0].message, "a differs between ranks");
  CHECK_CONTAINS(decision.refuse[0].message, "rank 0: float32[2]\n");
  CHECK_CONTAINS(decision.refuse[0].message, "rank 1: float32[3]\n");
  CHECK_CONTAINS(decision.refuse[0].message, "rank 2: float32[2]\n");
}

TEST(the_last_ranks_difference_counts) {
  CHECK_EQ(refused(decide({staying({{"a", "1"}}), staying({{"a", "1"}}), staying({{"a", "2"}})})),
           "a");
  CHECK_EQ(refused(decide({staying({{"a", "2"}}), staying({{"a", "1"}}), staying({{"a", "1"}})})),
           "a");
}

// Rank 2 has not submitted it yet: it may turn out to be missing there, or different there too.
TEST(what_is_not_pending_everywhere_waits) {
  const Decision decision =
      decide({staying({{"a", "1"}}), staying({{"a", "2"}}), staying({{"b", "1"}})});
  CHECK(decision.nothing());
  CHECK(decide({staying({{"a", "1"}}), staying({})}).nothing());
  CHECK(decide({staying({}), staying({{"a", "1"}})}).nothing());
  CHECK(decide({staying({}), staying({})}).nothing());
}

TEST(a_rank_that_left_fails_the_rest) {
  const Decision decision =
      decide({staying({{"a", "1"}}), leaving("the script ended", {}), staying({{"a", "1"}})});
  CHECK(!decision.nothing());
  CHECK_EQ(decision.left, "rank 1 has left the job: the script ended (on host1)");
  CHECK_EQ(joined(decision.run) + refused(decision), "");

  const Decision two =
      decide({leaving("one", {{"a", "1"}}), staying({{"b", "1"}}), leaving("two", {})});
  CHECK_CONTAINS(two.left, "rank 0 has left the job: one");
  CHECK_CONTAINS(two.left, "rank 2 has left the job: two");
  CHECK(two.left.find("rank 1") == std::string::npos);
  const auto more = {leaving("one", {{"a", "1"}}), staying({{"a", "1"}}), leaving("two", {})};
  CHECK_CONTAINS(decide(more).left, "rank 2 has left the job: two");
}

TEST(what_a_leaving_rank_left_behind_is_served_first) {
  const Decision first = decide({staying({{"a", "1"}, {"b", "1"}}), leaving("done", {{"b", "1"}})});
  CHECK_EQ(joined(first.run), "b");
  CHECK_EQ(first.left, "");
  const Decision refusal =
      decide({staying({{"a", "1"}, {"b", "1"}}), leaving("done", {{"b", "2"}})});
  CHECK_EQ(refused(refusal), "b");
  CHECK_EQ(refusal.left, "");
  CHECK_CONTAINS(decide({staying({{"a", "1"}}), leaving("done", {})}).left, "rank 1");
}

TEST(all_left_with_nothing_pending) {
  CHECK(decide({leaving("one", {}), leaving("two", {})}).nothing());
}

// Rank 0 has left behind all that the others still have to submit.
TEST(a_rank_that_left_is_not_blamed_for_what_it_submitted) {
  const Report gone = leaving("done", {{"a", "1"}, {"b", "1"}});
  CHECK(decide({gone, staying({{"a", "1"}}), staying({{"b", "1"}})}).nothing());
  CHECK_CONTAINS(decide({gone, staying({{"c", "1"}}), staying({{"b", "1"}})}).left, "rank 0");
}

// The second request of an identity belongs to a later step of the program.
TEST(only_the_first_of_an_identity_counts) {
  const std::vector<Call> twice = {{"a", "1"}, {"b", "1"}, {"a", "2"}};
  CHECK_EQ(joined(decide({staying(twice), staying(twice)}).run), "a b");
  CHECK_EQ(joined(decide({staying(twice), staying({{"a", "1"}})}).run), "a");
  CHECK_EQ(joined(decide({staying({{"a", "1"}}), staying(twice)}).run), "a");
  const Decision decision = decide({staying(twice), staying({{"a", "2"}})});
  CHECK_EQ(refused(decision), "a");
  CHECK_EQ(joined(decision.run), "");
}

TEST(one_rank_agrees_with_itself) {
  const Decision decision = decide({staying({{"b", "1"}, {"a", "1"}, {"b", "2"}})});
  CHECK_EQ(joined(decision.run), "b a");
  CHECK_EQ(refused(decision), "");
}

TEST(a_problem_of_one_rank_refuses_for_all) {
  const Decision decision =
      decide({staying({{"a", "1"}}), staying({{"a", "1", "bad splits"}}), staying({{"a", "1"}})});
  CHECK_EQ(refused(decision), "a");
  if (decision.refuse.size() != 1) return;
  CHECK_EQ(decision.refuse[0].code, Code::invalid_argument);
  CHECK_CONTAINS(decision.refuse[0].message, "a cannot run:\n  rank 1: bad splits");
  CHECK(decide({staying({{"a", "1"}}), staying({{"b", "1", "bad"}})}).nothing());  // not yet
}

TEST(what_belongs_to_a_failed_step_does_not_wait) {
  Report failed = staying({{"a", "1"}, {"b", "1"}});
  for (Pending& pending : failed.queue) pending.failed = true;
  const Decision decision = decide({staying({{"b", "1"}, {"c", "1"}}), failed});
  CHECK_EQ(joined(decision.run), "b");  // all have come
  CHECK_EQ(refused(decision), "a");
  if (decision.refuse.size() != 1) return;
  CHECK_CONTAINS(decision.refuse[0].message, "another op of the same step has failed on rank 1");
}

TEST(who_has_joined_is_not_waited_for) {
  const Decision decision = decide({staying({{"join", ""}}), staying({{"a", "1"}, {"b", "1"}}),
                                    staying({{"b", "1"}, {"a", "1"}})});
  CHECK_EQ(joined(decision.run), "a b");
  CHECK_EQ(decision.run[0].header, "header a");
  // What it submitted before it joined counts.
  CHECK_EQ(refused(decide({staying({{"a", "2"}, {"join", ""}}), staying({{"a", "1"}})})), "a");
  // Who has neither joined nor submitted is waited for.
  CHECK(decide({staying({{"join", ""}}), staying({{"a", "1"}}), staying({})}).nothing());
}

TEST(joining_is_not_negotiated) {
  CHECK(decide({staying({{"join", ""}}), staying({})}).nothing());
  CHECK_EQ(
      joined(
          decide({staying({{"join", ""}}), staying({{"a", "1"}, {"join", ""}, {"b", "1"}})}).run),
      "a b");
  const Decision gone = decide({staying({{"join", ""}}), leaving("done", {})});
  CHECK_CONTAINS(gone.left, "rank 1 has left the job: done");
}

TEST(the_last_that_has_joined_is_known) {
  const auto of = [](int number, bool had_joined) {
    Report report = staying({{"join", ""}});
    report.number = number;
    report.had_joined = had_joined;
    return Digest(report);
  };
  Digest all = of(1, false);
  all.add(of(0, false));
  all.add(of(2, true));
  CHECK_EQ(all.newly_joined, 1);
  CHECK_EQ(all.absent, -1);
}

TEST(what_needs_a_rank_that_has_joined_is_refused) {
  const auto refusal = [](int needs) {
    const Decision decision = decide({staying({{"a", "1", "", needs}}), staying({{"join", ""}}),
                                      staying({{"a", "1", "", needs}})});
    return decision.refuse.empty() ? joined(decision.run) : decision.refuse[0].message;
  };
  CHECK_CONTAINS(refusal(1), "a cannot run without rank 1");
  CHECK_CONTAINS(refusal(Pending::everybody), "a cannot run without rank 1");
  CHECK_EQ(refusal(0), "a");
  CHECK_EQ(refusal(2), "a");
  CHECK_EQ(refusal(Pending::nobody), "a");
}

TEST(who_has_waited_too_long_ends_it) {
  Report tired = staying({{"a", "1"}});
  tired.waited = 12.5;
  const Decision decision = decide({staying({{"b", "1"}}), tired});
  CHECK_CONTAINS(decision.stuck, "no progress for 12 s");
  CHECK_CONTAINS(decision.stuck, "rank 0 has submitted: b");
  CHECK_CONTAINS(decision.stuck, "rank 1 has submitted: a");
  CHECK_EQ(decide({staying({{"a", "1"}}), tired}).stuck, "");  // there is progress
  CHECK_EQ(decide({leaving("done", {}), tired}).stuck, "");    // there is a better reason
}

TEST(a_mismatch_fails_what_is_pending) {
  Report a = staying({{"a", "1"}}), b = staying({{"b", "1"}});
  a.unchanged = 30.5, b.unchanged = 20;
  const Decision decision = decide({a, b});
  CHECK_EQ(joined(decision.run) + refused(decision) + decision.stuck + decision.left, "");
  CHECK(!decision.nothing());
  CHECK_CONTAINS(decision.mismatch, "for 20 s");
  CHECK_CONTAINS(decision.mismatch, "rank 0 has submitted: a\n");
  CHECK_CONTAINS(decision.mismatch, "rank 1 has submitted: b\n");
  CHECK_CONTAINS(decision.mismatch, "hvd.data.agree_on_steps");
  CHECK_EQ(decide({a, a}).mismatch, "");                      // there is progress
  CHECK_EQ(decide({a, staying({{"b", "1"}})}).mismatch, "");  // somebody has just come
  Report silent = staying({});
  silent.unchanged = 20;
  CHECK(decide({a, b, silent}).nothing());  // it may bring what they wait for
  CHECK_CONTAINS(decide({a, leaving("done", {})}).left, "rank 1");
  Report gone = leaving("done", {{"a", "1"}, {"b", "1"}});
  gone.unchanged = 20;
  CHECK_CONTAINS(decide({a, b, gone}).mismatch, "rank 2 has submitted: a, b");
  Report joins = staying({{"join", ""}});
  joins.unchanged = 20;
  CHECK_EQ(joined(decide({a, joins}).run), "a");
  CHECK_CONTAINS(decide({a, b, joins}).mismatch, "rank 2 has submitted: join");
}

TEST(summary_shows_each_rank_and_cuts_long_queues) {
  std::vector<Call> seven;
  for (char c = 'a'; c < 'h'; ++c) seven.push_back({std::string(1, c), "1"});
  std::vector<Report> reports = {staying(seven), staying({{"x", "1"}}), staying({})};
  reports[1].rank = 1;
  reports[2].rank = 5;  // of the job
  CHECK_EQ(test::decide(reports).summary, "");
  reports[0].warns = true;
  CHECK_EQ(test::decide(reports).summary,
           "\n  rank 0 has submitted: a, b, c, d, e and 2 more"
           "\n  rank 1 has submitted: x"
           "\n  rank 5 has submitted: ");
}

// Of each rank, what `call` makes of its number.
template <typename Call>
std::string refusal_of(int ranks, const Call& call) {
  std::vector<Report> reports;
  for (int r = 0; r < ranks; ++r) reports.push_back(staying({call(r)}));
  const Decision decision = decide(reports);
  return decision.refuse.empty() ? "none" : decision.refuse[0].message;
}

TEST(many_ranks_are_shown_in_groups) {
  const auto halves = [](int r) { return r < 500 || r == 990 ? "float32[2]" : "float32[3]"; };
  CHECK_EQ(refusal_of(1000, [&](int r) { return Call{"a", halves(r)}; }),
           "a differs between ranks:"
           "\n  ranks 0-499, 990: float32[2]"
           "\n  ranks 500-989, 991-999: float32[3]"
           "\nEvery rank must call it with the same dtype, shape, op, root and scale factors.");
  CHECK_CONTAINS(refusal_of(100, [](int r) { return Call{"a", r % 2 ? "odd" : "even"}; }),
                 "\n  ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 34 more: "
                 "even\n  ranks 1, 3,");
  const std::string all = refusal_of(100, [](int r) { return Call{"a", std::to_string(r % 50)}; });
  CHECK_CONTAINS(all, "\n  rank 0: 0\n");  // rank 50 is one of the others
  CHECK_CONTAINS(all, "\n  ranks 15, 65: 15\n  and 82 other ranks\n");
  const auto one = [](int r) { return Call{"a", "1", r == 77 ? "bad splits" : ""}; };
  CHECK_EQ(refusal_of(100, one), "a cannot run:\n  rank 77: bad splits");
  std::vector<Report> reports(100, leaving("done", {}));
  reports[99] = staying({{"a", "1"}});
  for (Report& report : reports) report.host = "here";
  for (int r = 0; r < 100; ++r) reports[r].rank = r;
  CHECK_EQ(test::decide(reports).left, "ranks 0-98 have left the job: done (on here)");
}

TEST(what_is_combined_does_not_grow) {
  std::mt19937 random(1);
  const std::string longer(1000, 'x');
  const auto bytes = [&](int ranks, bool own_names) {
    std::vector<Digest> digests;
    for (int r = 0; r < ranks; ++r) {
      const std::string name = own_names ? std::to_string(r) : r % 2 ? "odd" : "even";
      Report report = staying({{name, "1"}, {"both" + longer, "1"}, {name + " again", longer}});
      report.number = r;
      digests.emplace_back(report);
    }
    return encode(test::combined(digests, random)).size();
  };
  const size_t one = bytes(1, false);
  CHECK(one < 200);
  for (bool own_names : {false, true}) {
    CHECK(bytes(1000, own_names) < one);
    CHECK_EQ(bytes(1000, own_names), bytes(2, own_names));
  }
}

// For the rest, hashes are enough.
TEST(texts_travel_if_they_are_shown) {
  const auto needed = [](const std::vector<Report>& reports) {
    Digest all(reports[0]);
    all.add(Digest(reports[1]));
    return hvd::decide(all).needs_texts;
  };
  const Report a = staying({{"a", "1"}}), both = staying({{"b", "1"}, {"a", "1"}});
  CHECK(!needed({a, both}));
  CHECK(!needed({a, staying({{"b", "1"}})}));
  CHECK(needed({a, staying({{"a", "2"}})}));
  CHECK(needed({a, staying({{"a", "1", "bad"}})}));
  CHECK(needed({a, leaving("done", {})}));
  CHECK(needed({a, staying({{"join", ""}})}));  // a header
  Report warns = a;
  warns.warns = true;
  CHECK(needed({warns, both}));
}

TEST(what_is_cut_short_throws) {
  const Report report = leaving("why", {{"identity", "signature"}});
  Digest digest(report);
  digest.failed = {1, 2};
  const std::string bytes = encode(digest);
  hvd::Decision refuses;
  refuses.refuse.push_back({hash_of("identity"), Refusal::differs});
  const std::string texts = encode(Texts(refuses, digest, report));
  int thrown = 0;
  for (size_t size = 0; size < bytes.size(); ++size) try {
      (void)hvd::decode<Digest>(bytes.substr(0, size));
    } catch (const std::runtime_error&) {
      ++thrown;
    }
  for (size_t size = 0; size < texts.size(); ++size) try {
      (void)hvd::decode<Texts>(texts.substr(0, size));
    } catch (const std::runtime_error&) {
      ++thrown;
    }
  CHECK_EQ(thrown, static_cast<int>(bytes.size() + texts.size()));
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
