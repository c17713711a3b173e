// The counters of a host's ranks, with ranks as threads: for ThreadSanitizer.
#include "core/cpu/host_counters.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "core/base/shared_atomic.h"
#include "tests/support/check.h"

namespace hvd {
namespace {

constexpr int kRanks = 4, kManyRanks = 2 * kRanksPerGroup + 3;
constexpr uint64_t kWindow = 4;

std::string no_deadline(double, const Missing&) { return ""; }

void* memory;  // that the ranks share

// Runs a body on each rank, with counters in memory that all share; it begins with `first`.
void on_all_ranks(int ranks_per_core, const std::function<void(HostCounters&, int)>& body,
                  char first = 0, int size = kRanks) {
  const auto bytes = static_cast<size_t>(HostCounters::bytes(size));
  memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::fill_n(static_cast<char*>(memory), bytes, '\0');
  *static_cast<char*>(memory) = first;
  test::in_threads(size, [&](int rank) {
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 10);  // in the job
    HostCounters counters(memory, rank, ranks, ranks_per_core);
    body(counters, rank);
  });
  std::free(memory);
}

void pass_time(std::mt19937& random) {
  if (random() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

// What is not atomic is written by one rank and read by the others, as the counters allow.
void what_was_written_before_is_seen(int ranks_per_core, int size = kRanks,
                                     uint64_t chunks = 2000) {
  uint64_t slots[kManyRanks][kWindow] = {};
  const auto body = [&](HostCounters& counters, int rank) {
    std::mt19937 random(rank);
    HostCounters::Targets targets = HostCounters::kNone;
    const auto wait_for = [&](HostCounters::Kind kind, uint64_t value) {
      targets = HostCounters::kNone;
      targets[kind] = value;
      counters.wait(targets, no_deadline);
    };
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk >= kWindow) wait_for(HostCounters::unpacked, chunk + 1 - kWindow);
      slots[rank][chunk % kWindow] = chunk * (rank + 1);
      counters.advance(HostCounters::packed, chunk + 1);
      pass_time(random);
      wait_for(HostCounters::packed, chunk + 1);
      for (int r = 0; r < size; ++r) CHECK_EQ(slots[r][chunk % kWindow], chunk * (r + 1));
      counters.advance(HostCounters::unpacked, chunk + 1);
    }
  };
  on_all_ranks(ranks_per_core, body, 0, size);
}

// Who waits for long sleeps in both.
TEST(spinning_ranks_see_what_was_written) { what_was_written_before_is_seen(1); }
TEST(yielding_ranks_see_what_was_written) { what_was_written_before_is_seen(2); }
TEST(many_ranks_see_what_was_written) { what_was_written_before_is_seen(2, kManyRanks, 200); }

// One that stops between its own counter and that of its group; as a rank without groups, it has
// none of the latter.
TEST(a_rank_that_stops_does_not_stop_the_others) {
  const auto body = [](HostCounters& counters, int rank) {
    if (rank == 3) {
      HostCounters(memory, rank, {0, 1, 2, 3}, 2).advance(HostCounters::arrived, 1);
    } else {
      HostCounters::Targets targets = HostCounters::kNone;
      targets[HostCounters::arrived] = 1;
      counters.advance(HostCounters::arrived, 1);
      counters.wait(targets, [](double seconds, const Missing&) {
        return seconds > 10 ? "waits for nobody" : "";
      });
    }
  };
  on_all_ranks(2, body, 0, kManyRanks);
}

// A rank that waits for either of two counters goes on with the first that comes.
TEST(any_target_ends_a_wait) {
  on_all_ranks(2, [&](HostCounters& counters, int rank) {
    HostCounters::Targets targets = HostCounters::kNone;
    targets[HostCounters::packed] = targets[HostCounters::reduced] = 1;
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    counters.advance(HostCounters::reduced, 1);
    counters.wait(targets, no_deadline);
    CHECK_EQ(counters.least(HostCounters::reduced), uint64_t{1});
    CHECK_EQ(counters.least(HostCounters::packed), uint64_t{0});
  });
}

// Only the last to come wakes the others: they look no more often than their looks are apart.
TEST(nobody_is_woken_in_vain) {
  on_all_ranks(2, [&](HostCounters& counters, int rank) {
    for (uint64_t round = 1; round <= 20; ++round) {
      HostCounters::Targets targets = HostCounters::kNone;
      targets[HostCounters::arrived] = round;
      std::this_thread::sleep_for(std::chrono::milliseconds(rank));
      counters.advance(HostCounters::arrived, round);
      int looks = 0;
      counters.wait(targets, [&](double seconds, const Missing& missing) {
        CHECK(seconds >= ++looks * 0.01);
        CHECK(!missing().empty());
        return std::string();
      });
    }
  });
}

TEST(the_deadline_names_who_is_missing_and_reaches_all) {
  on_all_ranks(2, [&](HostCounters& counters, int rank) {
    HostCounters::Targets targets = HostCounters::kNone;
    targets[HostCounters::packed] = 1;
    std::string why;
    try {
      if (rank != 2) counters.advance(HostCounters::packed, 1);
      while (rank == 2) counters.check_aborted();
      counters.wait(targets, [&](double, const Missing& missing) {
        return missing() == std::vector<int>{12} ? "rank 12 is missing" : "";
      });
    } catch (const Aborted& aborted) {
      why = aborted.what();
    }
    CHECK_EQ(why, "rank 12 is missing");
  });
}

TEST(a_rank_killed_while_it_aborts_does_not_stop_the_others) {
  constexpr char kWritesTheReason = 1;
  const auto abort_too = [](HostCounters& counters, int rank) {
    try {
      counters.abort("reason of " + std::to_string(rank));
    } catch (const Aborted& aborted) {
      CHECK_CONTAINS(aborted.what(), "reason of");
    }
    CHECK(counters.aborted());
  };
  on_all_ranks(2, abort_too, kWritesTheReason);
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
