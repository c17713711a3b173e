// Several process sets on the same GPUs: ranks are threads, on the fake of CUDA and NCCL, which
// ends the process if two ranks launch in different orders, or two sets at once.
#include <deque>

#include "tests/support/gpu_ranks.h"

namespace hvd {
namespace {

using test::GpuCall;
using test::GpuRank;

constexpr int kCalls = 60;

void expect_all(GpuRank& rank, std::deque<GpuCall>& calls) {
  for (GpuCall& call : calls) {
    Status status;
    CHECK(call.wait(&status));
    CHECK_EQ(status.message, "");
    call.fetch();
  }
  rank.device.synchronize();
  for (const GpuCall& call : calls) call.expect_values();
}

void leave(GpuRank& rank) {
  for (const auto& engine : rank.sets) engine->announce_leaving("the test is over");
  for (const auto& engine : rank.sets) CHECK_EQ(engine->leave(-1), Engine::LeaveResult::all_left);
}

// Each rank gives its sets' requests out in an order of its own; nothing but that could make the
// launches differ, and everything does.
void ranks_differ_in_their_order() {
  test::on_gpu_ranks(2, {}, [](GpuRank& rank) {
    std::deque<GpuCall> calls;
    for (int i = 0; i < kCalls; ++i) {
      for (int k = 0; k < 2; ++k) {
        const int set = (k + rank.rank) % 2;
        const Kind kind = i % 3 == 0 ? Kind::allgather : Kind::allreduce;
        GpuCall& call =
            calls.emplace_back(rank.device, kind, std::to_string(i) + " of " + std::to_string(set),
                               rank.rank, 2 + set);
        call.begin();
        call.submit(*rank.sets[set]);
      }
    }
    expect_all(rank, calls);
    calls.clear();
    leave(rank);
  });
}

// A set's request waits for another set's result on one rank, while the other rank has given it out
// long before: no order may be fixed before all ranks have the request.
void one_set_waits_for_the_other() {
  test::on_gpu_ranks(2, {}, [](GpuRank& rank) {
    for (int i = 0; i < 20; ++i) {
      std::deque<GpuCall> calls;
      for (int set = 0; set < 2; ++set) {
        calls.emplace_back(rank.device, Kind::allreduce, std::to_string(i), rank.rank, 2 + set);
        calls.back().begin();
      }
      Status status;
      calls[0].submit(*rank.sets[0]);
      if (rank.rank == 1) CHECK(calls[0].wait(&status));
      CHECK_EQ(status.message, "");
      calls[1].submit(*rank.sets[1]);
      if (rank.rank == 0) CHECK(calls[0].wait(&status));
      CHECK(calls[1].wait(&status));
      CHECK_EQ(status.message, "");
      for (GpuCall& call : calls) call.fetch();
      rank.device.synchronize();
      for (const GpuCall& call : calls) call.expect_values();
    }
    leave(rank);
  });
}

}  // namespace
}  // namespace hvd

int main() {
  using namespace hvd;
  return test::run({
      {"ranks differ in their order", ranks_differ_in_their_order},
      {"one set waits for the other", one_set_waits_for_the_other},
  });
}
