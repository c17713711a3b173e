// Where the engine meets its environment: threads, floating-point modes, signals, time.
#include <fcntl.h>
#include <unistd.h>

#include <cfenv>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "core/cpu/shared_memory.h"
#include "tests/support/test_call.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace {
std::atomic<int> interruptions{0};
int broadcasts = 0;
}  // namespace

// In place of MPI's, which it calls.
extern "C" int MPI_Ibcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm communicator,
                          MPI_Request* request) {
  ++broadcasts;
  return PMPI_Ibcast(data, n, type, root, communicator, request);
}

// In place of glibc's, whose calls of the kernel signals interrupt.
extern "C" int posix_fallocate(int file, off_t offset, off_t bytes) {
  if (interruptions > 0) {
    --interruptions;
    return EINTR;
  }
  return fallocate(file, 0, offset, bytes) == 0 ? 0 : errno;
}

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;
using test::with_engine;

// As TensorFlow's threads are: numbers below the least normal one count as 0. And another rounding.
void set_other_arithmetic() {
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
  std::fesetround(FE_UPWARD);
}

// First: an ended thread keeps its name for a moment, and takes no signal at all.
TEST(engines_have_a_name_and_take_no_signals) {
  with_engine([](Engine& engine) {
    Call served(Kind::barrier,
                "");  // so the thread runs: while it starts, it takes no signal at all
    served.submit(engine);
    served.expect_ok();
    int found = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name, line;
      std::getline(std::ifstream(task.path() / "comm"), name);
      if (name != "hvd set 0") continue;
      ++found;
      std::ifstream status(task.path() / "status");
      while (std::getline(status, line) && line.compare(0, 7, "SigBlk:") != 0) {
      }
      const uint64_t blocked = std::stoull(line.substr(7), nullptr, 16);
      for (const int signal : {SIGALRM, SIGCHLD, SIGINT, SIGPROF, SIGTERM, SIGUSR1})
        CHECK(blocked >> (signal - 1) & 1);
      for (const int signal : {SIGBUS, SIGFPE, SIGSEGV}) CHECK(!(blocked >> (signal - 1) & 1));
    }
    CHECK_EQ(found, 1);
  });
}

// The sum of numbers that are 0 for some modes, and of numbers whose sum is between two others.
TEST(sums_do_not_depend_on_the_threads_modes) {
  with_engine([](Engine& engine) {
    for (int round = 0; round < 6; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      // The last to come sums in its own thread, the others in their engines'.
      if (rank != round % size) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      Call call(Kind::allreduce, "sum " + std::to_string(round));
      call.add(DType::float32, {2})
          .add(DType::float32, {3000})
          .change_inputs([](int of_rank, size_t, int64_t index) {
            if (index != 1) return 1e-40 * (of_rank + 1);
            return of_rank == 0 ? 1.0 : 1e-9;
          });
      fenv_t before;
      std::fegetenv(&before);
      if (rank % 2 == 1 || size == 1) set_other_arithmetic();
      call.submit(engine);
      std::fesetenv(&before);
      call.expect_ok();
      float tiny = 0, sum = 0;
      for (int r = 0; r < size; ++r) {
        tiny += static_cast<float>(1e-40 * (r + 1));
        sum += r == 0 ? 1.0F : 1e-9F;
      }
      for (size_t tensor = 0; tensor < 2; ++tensor) {
        CHECK_EQ(call.output<float>(tensor)[0], tiny);
        CHECK_EQ(call.output<float>(tensor)[1], sum);
      }
    }
  });
}

// A signal that comes while memory is reserved does not mean that there is none.
TEST(signals_do_not_take_memory_away) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::vector<SharedMemory::Area> areas(2, {1 << 20, 4096});
  interruptions = 3;
  SharedMemory memory(MPI_COMM_WORLD, ranks, areas);
  CHECK_EQ(interruptions.load(), 0);
  interruptions = 3;
  CHECK(memory.commit());
  CHECK_EQ(interruptions.load(), 0);
  memory.barrier([](double, const Missing&) { return std::string(); });
}

// A second request may come at any moment of a negotiation about the first. If the ranks missed it,
// they would wait for their next report, hundreds of times as long as a pair in one order takes.
TEST(orders_that_cross_cost_no_waits) {
  with_engine([](Engine& engine) {
    const auto seconds = [&](bool crosses) {
      const auto start = Clock::now();
      for (int i = 0; i < 400; ++i) {
        std::deque<Call> pair;
        for (const char* name : {"a", "b"})
          pair.emplace_back(Kind::allreduce, name).add(DType::float32, {16});
        const size_t first = crosses && rank % 2;
        pair[first].submit(engine);
        for (const auto now = Clock::now(); seconds_since(now) < i % 40 * 5e-6;) continue;
        pair[1 - first].submit(engine);
        for (Call& call : pair) call.expect_sum();
      }
      return seconds_since(start);
    };
    const double straight = seconds(false), crossed = seconds(true);
    CHECK_EQ(crossed > 8 * straight, false);
  });
}

// What an abort leaves under way uses memory that is no longer valid, so MPI must not work for the
// process's other sets either, not even once. Last: it is for ever.
TEST(after_an_abort_no_set_calls_mpi) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  // For ever: with messages under way.
  static auto* const aborted = new MpiTransport(MPI_COMM_WORLD, ranks);
  static auto* const other = new MpiTransport(MPI_COMM_WORLD, ranks);
  test::Call call(Kind::broadcast, "later");
  call.add(DType::float32, {4});
  call.request.outputs.push_back(const_cast<void*>(call.request.inputs[0].data));
  const Waiting patient = [](double, const Missing&) { return std::string(); };
  CHECK(other->run(call.request, patient).ok());
  CHECK_EQ(broadcasts, 1);
  const auto aborts = [](const auto& does) {
    try {
      does();
    } catch (const Aborted& why) {
      return std::string(why.what());
    }
    return std::string();
  };
  CHECK_EQ(aborts([&] { aborted->abort("over"); }), "over");
  CHECK_EQ(aborts([&] { (void)other->run(call.request, patient); }), "over");
  CHECK_EQ(broadcasts, 1);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
