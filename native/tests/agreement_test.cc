// decide() on cases written by hand. explorer_test.cc tries what nobody would write.
#include "core/agreement.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/check.h"

namespace hvd {
namespace {

Report staying(std::vector<Pending> queue) { return {std::move(queue), false, ""}; }
Report leaving(std::string reason, std::vector<Pending> queue) {
  return {std::move(queue), true, std::move(reason)};
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string refused(const Decision& decision) {
  std::vector<std::string> identities;
  for (const Refusal& refusal : decision.refuse) identities.push_back(refusal.identity);
  return joined(identities);
}

void equal_requests_run_in_the_order_of_rank_0() {
  const Decision decision = decide({staying({{"b", "1"}, {"x", "1"}, {"a", "2"}, {"c", "3"}}),
                                    staying({{"c", "3"}, {"a", "2"}, {"y", "1"}, {"b", "1"}}),
                                    staying({{"a", "2"}, {"c", "3"}, {"b", "1"}, {"x", "1"}})});
  CHECK_EQ(joined(decision.run), "b a c");
  CHECK_EQ(refused(decision), "");
  CHECK_EQ(decision.left, "");
  CHECK(!decision.nothing());
}

void different_signatures_are_refused_with_every_ranks() {
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

void the_last_ranks_difference_counts() {
  CHECK_EQ(refused(decide({staying({{"a", "1"}}), staying({{"a", "1"}}), staying({{"a", "2"}})})),
           "a");
  CHECK_EQ(refused(decide({staying({{"a", "2"}}), staying({{"a", "1"}}), staying({{"a", "1"}})})),
           "a");
}

// Rank 2 has not submitted it yet: it may turn out to be missing there, or different there too.
void what_is_not_pending_everywhere_waits() {
  const Decision decision =
      decide({staying({{"a", "1"}}), staying({{"a", "2"}}), staying({{"b", "1"}})});
  CHECK(decision.nothing());
  CHECK(decide({staying({{"a", "1"}}), staying({})}).nothing());
  CHECK(decide({staying({}), staying({{"a", "1"}})}).nothing());
  CHECK(decide({staying({}), staying({})}).nothing());
}

void a_rank_that_left_fails_the_rest() {
  const Decision decision =
      decide({staying({{"a", "1"}}), leaving("the script ended", {}), staying({{"a", "1"}})});
  CHECK(!decision.nothing());
  CHECK_EQ(decision.left, "rank 1 has left the job: the script ended");
  CHECK_EQ(joined(decision.run) + refused(decision), "");

  const Decision two =
      decide({leaving("one", {{"a", "1"}}), staying({{"b", "1"}}), leaving("two", {})});
  CHECK_CONTAINS(two.left, "rank 0 has left the job: one");
  CHECK_CONTAINS(two.left, "rank 2 has left the job: two");
  CHECK(two.left.find("rank 1") == std::string::npos);
}

void what_a_leaving_rank_left_behind_is_served_first() {
  const Decision first = decide({staying({{"a", "1"}, {"b", "1"}}), leaving("done", {{"b", "1"}})});
  CHECK_EQ(joined(first.run), "b");
  CHECK_EQ(first.left, "");
  const Decision refusal =
      decide({staying({{"a", "1"}, {"b", "1"}}), leaving("done", {{"b", "2"}})});
  CHECK_EQ(refused(refusal), "b");
  CHECK_EQ(refusal.left, "");
  CHECK_CONTAINS(decide({staying({{"a", "1"}}), leaving("done", {})}).left, "rank 1");
}

void all_left_with_nothing_pending() {
  CHECK(decide({leaving("one", {}), leaving("two", {})}).nothing());
}

// Rank 0 has left behind all that the others still have to submit.
void a_rank_that_left_is_not_blamed_for_what_it_submitted() {
  const Report gone = leaving("done", {{"a", "1"}, {"b", "1"}});
  CHECK(decide({gone, staying({{"a", "1"}}), staying({{"b", "1"}})}).nothing());
  CHECK_CONTAINS(decide({gone, staying({{"c", "1"}}), staying({{"b", "1"}})}).left, "rank 0");
}

// The second request of an identity belongs to a later step of the program.
void only_the_first_of_an_identity_counts() {
  const std::vector<Pending> twice = {{"a", "1"}, {"b", "1"}, {"a", "2"}};
  CHECK_EQ(joined(decide({staying(twice), staying(twice)}).run), "a b");
  CHECK_EQ(joined(decide({staying(twice), staying({{"a", "1"}})}).run), "a");
  CHECK_EQ(joined(decide({staying({{"a", "1"}}), staying(twice)}).run), "a");
  const Decision decision = decide({staying(twice), staying({{"a", "2"}})});
  CHECK_EQ(refused(decision), "a");
  CHECK_EQ(joined(decision.run), "");
}

void one_rank_agrees_with_itself() {
  const Decision decision = decide({staying({{"b", "1"}, {"a", "1"}, {"b", "2"}})});
  CHECK_EQ(joined(decision.run), "b a");
  CHECK_EQ(refused(decision), "");
}

void summary_shows_each_rank_and_cuts_long_queues() {
  std::vector<Pending> seven;
  for (char c = 'a'; c < 'h'; ++c) seven.push_back({std::string(1, c), "1"});
  const std::string text = summary({staying(seven), staying({{"x", "1"}}), staying({})});
  CHECK_CONTAINS(text, "rank 0 has submitted: a, b, c, d, e and 2 more");
  CHECK_CONTAINS(text, "rank 1 has submitted: x");
  CHECK_CONTAINS(text, "rank 2 has submitted: ");
}

void reports_survive_the_way_through_bytes() {
  const std::string odd("\0quote' \n\xff", 10);
  for (const Report& report :
       {staying({}), leaving("", {}), leaving("why", {}), staying({{"", ""}}),
        leaving(odd, {{odd, ""}, {"a", odd}, {"a", std::string(100000, 'x')}})}) {
    const Report copy = decode(encode(report));
    CHECK_EQ(copy.leaving, report.leaving);
    CHECK_EQ(copy.reason, report.reason);
    if (!CHECK_EQ(copy.queue.size(), report.queue.size())) continue;
    for (size_t i = 0; i < report.queue.size(); ++i) {
      CHECK_EQ(copy.queue[i].identity, report.queue[i].identity);
      CHECK_EQ(copy.queue[i].signature, report.queue[i].signature);
    }
  }
}

void reports_that_are_cut_short_throw() {
  const std::string head = encode(leaving("why", {}));
  const std::string whole = encode(leaving("why", {{"identity", "signature"}}));
  for (size_t size = 0; size < whole.size(); ++size) {
    if (size == head.size()) continue;  // this much is a report with an empty queue
    test::context = std::to_string(size) + " bytes";
    bool thrown = false;
    try {
      decode(whole.substr(0, size));
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

}  // namespace
}  // namespace hvd

int main() {
  using namespace hvd;
  return test::run({
      {"equal requests run in the order of rank 0", equal_requests_run_in_the_order_of_rank_0},
      {"different signatures are refused with every rank's",
       different_signatures_are_refused_with_every_ranks},
      {"the last rank's difference counts", the_last_ranks_difference_counts},
      {"what is not pending everywhere waits", what_is_not_pending_everywhere_waits},
      {"a rank that left fails the rest", a_rank_that_left_fails_the_rest},
      {"what a leaving rank left behind is served first",
       what_a_leaving_rank_left_behind_is_served_first},
      {"all left with nothing pending", all_left_with_nothing_pending},
      {"a rank that left is not blamed for what it submitted",
       a_rank_that_left_is_not_blamed_for_what_it_submitted},
      {"only the first of an identity counts", only_the_first_of_an_identity_counts},
      {"one rank agrees with itself", one_rank_agrees_with_itself},
      {"summary shows each rank and cuts long queues",
       summary_shows_each_rank_and_cuts_long_queues},
      {"reports survive the way through bytes", reports_survive_the_way_through_bytes},
      {"reports that are cut short throw", reports_that_are_cut_short_throw},
  });
}
