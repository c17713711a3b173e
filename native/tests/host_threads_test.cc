// HostTransport's protocol in shared memory with ranks as threads, for ThreadSanitizer.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "core/cpu/host_transport.h"
#include "tests/support/thread_ranks.h"

namespace hvd {
namespace {

using test::Call;
using test::kRanks;
using test::leave;
using test::LeaveResult;

void on_all_ranks(const Settings& settings, const std::function<void(Engine&, int)>& body) {
  const auto hub = std::make_shared<test::Hub>(kRanks);
  const size_t bytes = HostTransport::memory_bytes(kRanks);
  const std::unique_ptr<char, void (*)(void*)> memory(
      static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)), std::free);
  std::memset(memory.get(), 0, bytes);
  test::in_threads(kRanks, [&](int rank) {
    auto none = std::make_unique<test::ThreadTransport>(hub, rank);
    Engine engine(std::make_unique<HostTransport>(memory.get(), std::move(none)), settings);
    body(engine, rank);
  });
}

std::vector<float> values(int rank, size_t count, int seed) {
  std::vector<float> found(count);
  for (size_t i = 0; i < count; ++i) found[i] = static_cast<float>((i + seed) % 7 * (rank + 1));
  return found;
}

std::vector<float> sum_of(size_t count, int seed) {
  std::vector<float> sum(count);
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<float> theirs = values(rank, count, seed);
    for (size_t i = 0; i < count; ++i) sum[i] += theirs[i];
  }
  return sum;
}

// Each rank pauses now and then, where the others do not.
class Pauses {
 public:
  explicit Pauses(int rank) : random_(rank) {}
  void maybe() {
    const auto chance = random_() % 8;
    if (chance < 2) std::this_thread::yield();
    if (chance == 2) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
  }

 private:
  std::mt19937 random_;
};

// From those that travel with the proposals to those of many chunks; one after another, and queued.
TEST(sums_of_all_sizes) {
  constexpr size_t kSizes[] = {1, 100, 4000, 5000, 20000, 150000, 700000};
  on_all_ranks({}, [&](Engine& engine, int rank) {
    Pauses pauses(rank);
    std::mt19937 random(1);  // the same on all ranks
    for (int round = 0; round < 40; ++round) {
      std::deque<Call> calls;
      std::vector<size_t> sizes(1 + random() % 4);
      for (size_t& size : sizes) {
        size = kSizes[random() % (round % 8 == 0 ? 7 : 5)];
        calls.emplace_back(Kind::allreduce, std::to_string(calls.size()),
                           values(rank, size, round));
        pauses.maybe();
        calls.back().submit(engine);
      }
      for (size_t i = 0; i < sizes.size(); ++i) {
        CHECK_EQ(calls[i].wait().message, "");
        CHECK(calls[i].output == sum_of(sizes[i], round));
      }
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

// In between, the same slots serve barriers instead of chunks.
TEST(other_collectives_between_sums) {
  on_all_ranks({}, [](Engine& engine, int rank) {
    Pauses pauses(rank);
    for (int round = 0; round < 10; ++round) {
      const size_t count = std::vector<size_t>{3, 3000, 180000}[round % 3];
      const auto run = [&](Kind kind, Reduction reduction = Reduction::sum) {
        Call call(kind, "one", values(rank, count, round));
        call.request().reduction = reduction;
        call.request().root = 1;
        if (kind == Kind::broadcast) {
          call.output.resize(count);
          call.request().outputs.push_back(call.output.data());
        }
        pauses.maybe();
        CHECK_EQ(call.run(engine).message, "");
        return call.output;
      };
      CHECK(run(Kind::allreduce) == sum_of(count, round));
      std::vector<float> all;
      for (int r = 0; r < kRanks; ++r) {
        const std::vector<float> theirs = values(r, count, round);
        all.insert(all.end(), theirs.begin(), theirs.end());
      }
      CHECK(run(Kind::allgather) == all);
      CHECK(run(Kind::broadcast) == values(1, count, round));
      const std::vector<float> sum = sum_of(count, round), part = run(Kind::reducescatter);
      const size_t begin = count / kRanks * rank;
      CHECK(part == std::vector<float>(sum.begin() + begin, sum.begin() + begin + part.size()));
      CHECK_EQ(run(Kind::allreduce, Reduction::adasum).size(), count);
      run(Kind::barrier);
    }
    CHECK_EQ(leave(engine, "done"), LeaveResult::all_left);
  });
}

// A rank gives up in the middle of large sums; nobody waits for ever.
TEST(an_abort_reaches_all) {
  Settings settings;
  settings.timeout_seconds = settings.first_timeout_seconds = 0.5;
  on_all_ranks(settings, [](Engine& engine, int rank) {
    for (int i = 0;; ++i) {
      if (i == 3 && rank == 2) std::this_thread::sleep_for(std::chrono::seconds(2));
      Call call(Kind::allreduce, "sum", values(rank, 150000, i));
      const Status status = call.run(engine);
      if (status.ok()) {
        CHECK(i < 3);
        continue;
      }
      CHECK_EQ(status.code, Code::deadline_exceeded);
      CHECK_CONTAINS(status.message, "rank 2 (on here)");
      break;
    }
    CHECK_EQ(leave(engine, ""), LeaveResult::aborted);
  });
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
