// The engine with its ranks as threads of one process, for ThreadSanitizer, which MPI does not
// bear.
#include <deque>
#include <future>
#include <random>
#include <thread>

#include "tests/support/thread_ranks.h"

namespace hvd {
namespace {

using test::Call;
using test::kRanks;
using test::leave;
using test::LeaveResult;
using test::on_all_ranks;
using test::times_ranks;

// Four threads on each rank submit in an order of their own.
TEST(threads_of_all_ranks_submit_in_any_order) {
  on_all_ranks({}, [](Engine& engine, int rank) {
    test::in_threads(4, [&](int t) {
      std::vector<int> order(30);
      for (int i = 0; i < 30; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(rank * 10 + t));
      std::deque<Call> calls;
      for (int i = 0; i < 30; ++i) {
        const auto value = static_cast<float>(t * 100 + i);
        calls.emplace_back(Kind::allreduce, std::to_string(t) + "." + std::to_string(i),
                           std::vector<float>{value, value});
      }
      for (const int i : order) calls[i].submit(engine);
      for (int i = 0; i < 30; ++i) {
        CHECK_EQ(calls[i].wait().message, "");
        CHECK(calls[i].output == times_ranks(static_cast<float>(t * 100 + i)));
      }
    });
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

// If nothing is queued and the others come in time; otherwise the engine's thread goes on with it.
TEST(the_thread_that_submits_serves_requests) {
  for (const double patience : {1e9, 0.0}) {
    const auto body = [&](Engine& engine, int rank) {
      int here = 0;
      for (int i = 0; i < 50; ++i) {
        // Until the engine's thread waits for requests.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        Call call(Kind::allreduce, "one", {static_cast<float>(i + rank), 1});
        CHECK_EQ(call.run(engine).message, "");
        CHECK(call.output == (std::vector<float>{static_cast<float>(3 * i + 3), 3}));
        here += call.done_on == std::this_thread::get_id();
      }
      if (patience > 0) CHECK(here > 0);
      CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
    };
    on_all_ranks({}, body, patience);
  }
}

thread_local int nested = 0;  // calls of done()

// As a framework may that runs what comes next on the thread of done().
TEST(done_submits_without_nesting) {
  const auto body = [](Engine& engine, int rank) {
    std::deque<Call> calls;
    for (int i = 0; i < 100; ++i)
      calls.emplace_back(Kind::allreduce, "call " + std::to_string(i),
                         std::vector<float>{static_cast<float>(rank)});
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].then = [&, i] {
        CHECK_EQ(++nested, 1);
        if (i + 1 < calls.size()) calls[i + 1].submit(engine);
        --nested;
      };
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    calls[0].submit(engine);
    for (Call& call : calls) {
      CHECK_EQ(call.wait().message, "");
      CHECK(call.output == std::vector<float>{3});
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  };
  on_all_ranks({}, body, 1e9);
}

TEST(errors_reach_all_and_work_goes_on) {
  on_all_ranks({}, [](Engine& engine, int rank) {
    for (int i = 0; i < 20; ++i) {
      Call shape(Kind::allreduce, "shape", std::vector<float>(rank + 1));
      Call root(Kind::broadcast, "root", {1});
      root.request().root = rank == 1 ? 7 : 0;
      shape.submit(engine);
      root.submit(engine);
      CHECK_EQ(shape.wait().code, Code::failed_precondition);
      CHECK_EQ(root.wait().code, Code::invalid_argument);
      Call next(Kind::allreduce, "shape", {2, 2});
      CHECK_EQ(next.run(engine).message, "");
      CHECK(next.output == times_ranks(2));
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

TEST(ranks_join_one_after_another) {
  on_all_ranks({}, [](Engine& engine, int rank) {
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < rank; ++i) {
        Call rows(Kind::allgather, "rows " + std::to_string(i), {1, 2});
        CHECK_EQ(rows.run(engine).message, "");
        CHECK_EQ(rows.output.size(), size_t(2 * (kRanks - i - 1)));
      }
      Call join(Kind::join, "");
      CHECK_EQ(join.run(engine).message, "");
      int32_t last;
      std::memcpy(&last, join.output.data(), sizeof last);
      CHECK_EQ(last, kRanks - 1);
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

TEST(who_leaves_fails_what_others_submit_at_that_time) {
  on_all_ranks({}, [](Engine& engine, int rank) {
    if (rank == 1) {
      CHECK_EQ(leave(engine, "tired"), LeaveResult::left_early);
      return;
    }
    test::in_threads(3, [&](int t) {
      for (int i = 0; i < 5; ++i) {
        Call call(Kind::allreduce, std::to_string(t), {1, 1});
        const Status status = call.run(engine);
        CHECK_EQ(status.code, Code::aborted);
        CHECK_CONTAINS(status.message, "rank 1 has left the job: tired (on here)");
      }
    });
    CHECK_EQ(leave(engine, ""), LeaveResult::peer_left);
  });
}

TEST(the_deadline_reaches_all) {
  Settings settings;
  settings.timeout_seconds = 0.3;
  on_all_ranks(settings, [](Engine& engine, int rank) {
    for (int i = 0; i < 10; ++i) {  // past the first requests, for which the deadline is long
      Call first(Kind::barrier, "");
      CHECK_EQ(first.run(engine).message, "");
    }
    if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(1));
    Call late(Kind::allreduce, "late", {1, 1});
    const Status status = late.run(engine);
    CHECK_EQ(status.code, Code::deadline_exceeded);
    CHECK_CONTAINS(status.message, "which rank 2 (on here) has not submitted");
    CHECK_EQ(leave(engine, ""), LeaveResult::aborted);
  });
}

// Also if the thread that submits is in the middle of it.
TEST(the_deadline_reaches_who_serves_at_once) {
  Settings settings;
  settings.timeout_seconds = 0.3;
  const auto body = [](Engine& engine, int) {
    // Past the first requests, for which the deadline is long, and until no engine's thread is busy
    // with its start, so that all ranks have served one at once.
    float at_once = 0, everywhere = 0;
    for (int i = 0; i < 10 || everywhere < kRanks; ++i) {
      Call call(Kind::allreduce, "call", std::vector<float>(100, at_once));
      CHECK_EQ(call.run(engine).message, "");
      at_once = call.done_on == std::this_thread::get_id();
      everywhere = call.output[0];
    }
    Call stuck(Kind::allreduce, "stuck on rank 2", std::vector<float>(100));
    const Status status = stuck.run(engine);
    CHECK(stuck.done_on == std::this_thread::get_id());
    CHECK_EQ(status.code, Code::deadline_exceeded);
    CHECK_CONTAINS(status.message, "rank 2 (on here) stopped responding in the middle of");
    Call next(Kind::allreduce, "next", {1});
    CHECK_EQ(next.run(engine).code, Code::deadline_exceeded);
    CHECK_EQ(leave(engine, ""), LeaveResult::aborted);
  };
  on_all_ranks(settings, body, 1e9);
}

// Each new request lets the ranks look again at once, which is not the time that they wait.
TEST(many_early_looks_are_no_long_wait) {
  Settings settings;
  settings.timeout_seconds = settings.first_timeout_seconds = 2;
  on_all_ranks(settings, [](Engine& engine, int rank) {
    std::deque<std::deque<Call>> of_rank(kRanks);
    for (int k = 0; k < kRanks; ++k) {  // its own first, which the others submit later
      const int first = (rank + k) % kRanks;
      for (int i = 0; i < 300; ++i) {
        of_rank[first].emplace_back(Kind::allreduce,
                                    std::to_string(first) + "." + std::to_string(i),
                                    std::vector<float>{1, 1});
        if (k == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        of_rank[first].back().submit(engine);
      }
    }
    for (std::deque<Call>& calls : of_rank) {
      for (Call& call : calls) CHECK_EQ(call.wait().message, "");
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

TEST(a_mismatch_fails_on_all_and_work_goes_on) {
  Settings settings;
  settings.mismatch_seconds = 0.2;
  on_all_ranks(settings, [](Engine& engine, int rank) {
    for (int round = 0; round < 3; ++round) {
      // Rank 0 has a batch more than the others; or it has joined, and they differ.
      const bool joins = round == 2 && rank == 0;
      std::deque<Call> calls;
      if (joins) {
        calls.emplace_back(Kind::join, "");
      } else {
        const bool first = rank == (round == 2 ? 1 : 0);
        calls.emplace_back(first ? Kind::allreduce : Kind::allgather, first ? "batch" : "end",
                           std::vector<float>{1, 1});
        calls.emplace_back(Kind::allreduce, "of rank " + std::to_string(rank),
                           std::vector<float>{1, 1});
      }
      for (Call& call : calls) call.submit(engine);
      for (Call& call : calls) {
        const Status status = call.wait();
        CHECK_EQ(status.code, Code::failed_precondition);
        CHECK_CONTAINS(status.message, "the ranks wait for different collectives");
        CHECK_CONTAINS(status.message, "allreduce 'batch'");
        CHECK_CONTAINS(status.message,
                       "rank 2 has submitted: allgather 'end', allreduce 'of rank 2'");
      }
      Call next(Kind::allreduce, "batch", {2, 2});
      CHECK_EQ(next.run(engine).message, "");
      CHECK(next.output == times_ranks(2));
    }
    Call join(Kind::join, "");
    CHECK_EQ(join.run(engine).message, "");
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

// Each rank's threads come one after another, in another order than the next rank's.
TEST(threads_that_take_turns_are_no_mismatch) {
  Settings settings;
  settings.mismatch_seconds = 2;
  on_all_ranks(settings, [](Engine& engine, int rank) {
    std::deque<Call> calls;
    for (int i = 0; i < 4 * kRanks; ++i) {
      const int thread = (rank + i) % kRanks;
      calls.emplace_back(Kind::allreduce, "thread " + std::to_string(thread),
                         std::vector<float>{1, 1});
      calls.back().submit(engine);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    for (Call& call : calls) CHECK_EQ(call.wait().message, "");
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

// Where no rank has CUDA, nothing for GPUs is around the transport, which knows why.
TEST(tensors_of_gpus_without_cuda_are_refused) {
  const auto hub = std::make_shared<test::Hub>(1);
  auto transport = std::make_unique<test::ThreadTransport>(hub, 0);
  transport->set_why_no_gpu("CUDA was not found, install it.");
  Engine engine(std::move(transport), {});
  Call call(Kind::allreduce, "of a GPU", {1, 1});
  call.request().device = 0;
  const Status status = call.run(engine);
  CHECK_EQ(status.code, Code::invalid_argument);
  CHECK_EQ(status.message, "allreduce 'of a GPU': CUDA was not found, install it.");
  CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
