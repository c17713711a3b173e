// How engines end, and what waiting costs; on any number of ranks.
#include <sys/resource.h>

#include <thread>

#include "core/process_sets.h"
#include "core/world.h"
#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;

using LeaveResult = Engine::LeaveResult;

bool is_last() { return rank == size - 1; }

void expect_sum_of(Engine& engine, const std::string& name) {
  Call call(Kind::allreduce, name);
  call.add(DType::float32, {4}).submit(engine);
  call.expect_sum();
}

TEST(together_when_all_leave) {
  const auto engine = test::new_engine();
  expect_sum_of(*engine, "before");
  CHECK_EQ(test::leave(*engine, "it called hvd.shutdown()", 60), LeaveResult::all_left);
  Call late(Kind::allreduce, "late");
  late.add(DType::float32, {4}).submit(*engine);
  late.expect_error(Code::aborted, {"allreduce 'late' cannot run: this rank had left the job: it "
                                    "called hvd.shutdown(). Call hvd.init() again first."});
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);  // again, at once
}

TEST(together_when_nothing_was_ever_submitted) {
  const auto engine = test::new_engine();
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
}

TEST(who_leaves_early_fails_the_others_requests) {
  const auto engine = test::new_engine();
  expect_sum_of(*engine, "before");
  if (size == 1) {
    CHECK_EQ(test::leave(*engine, "the script ended", -1), LeaveResult::all_left);
    return;
  }
  const std::string why =
      "rank " + std::to_string(size - 1) + " has left the job: the script ended";
  if (is_last()) {
    CHECK_EQ(test::leave(*engine, "the script ended", -1), LeaveResult::left_early);
  } else {
    std::deque<Call> pending;
    for (const char* name : {"a", "b", "c"}) {
      pending.emplace_back(Kind::allreduce, name);
      pending.back().add(DType::float32, {4}).submit(*engine);
    }
    for (Call& call : pending)
      call.expect_error(Code::aborted, {"'" + call.request.name + "' cannot run", why});
    CHECK_EQ(test::leave(*engine, "me too", -1), LeaveResult::peer_left);
  }
  Call late(Kind::broadcast, "late");
  late.add(DType::float32, {4}).submit(*engine);
  late.expect_error(Code::aborted, {"broadcast 'late' cannot run", why});
}

// Each rank pairs off what the leaving rank has submitted, in whatever order, before it is gone.
TEST(who_leaves_is_served_first) {
  const auto engine = test::new_engine();
  Call a(Kind::allreduce, "a"), b(Kind::allreduce, "b");
  a.add(DType::float32, {4});
  b.add(DType::float32, {5});
  if (is_last()) {
    b.submit(*engine);
    a.submit(*engine);
    CHECK_EQ(test::leave(*engine, "early", -1), LeaveResult::all_left);
  } else {
    a.submit(*engine);
    b.submit(*engine);
  }
  a.expect_sum();
  b.expect_sum();
  if (!is_last()) CHECK_EQ(test::leave(*engine, "late", -1), LeaveResult::all_left);
}

// A rank that leaves with a request nobody shares fails with it.
TEST(leaving_ranks_own_requests_fail_too) {
  const auto engine = test::new_engine();
  Call call(Kind::allreduce, "of rank " + std::to_string(rank));
  call.add(DType::float32, {4}).submit(*engine);
  if (size == 1) {
    call.expect_sum();
    CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
    return;
  }
  if (rank == 0) CHECK_EQ(test::leave(*engine, "impatient", -1), LeaveResult::left_early);
  call.expect_error(Code::aborted, {"'" + call.request.name + "' cannot run",
                                    "rank 0 has left the job: impatient"});
  if (rank != 0) CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::peer_left);
}

TEST(no_answer_in_time_and_all_leave_later) {
  const auto engine = test::new_engine();
  if (size > 1 && rank == 0) {
    const auto start = std::chrono::steady_clock::now();
    CHECK_EQ(test::leave(*engine, "first", 0.3), LeaveResult::no_answer);
    const double waited =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(waited >= 0.3);
    CHECK(waited < 10);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK_EQ(test::leave(*engine, "second", -1), LeaveResult::all_left);
}

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + time.tv_usec * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The rank's own share of a core, all its threads together.
class Share {
 public:
  Share() : cpu_(cpu_seconds()), start_(std::chrono::steady_clock::now()) {}
  void expect_below(double limit) const {
    const double wall =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double share = (cpu_seconds() - cpu_) / wall;
    test::context = "rank " + std::to_string(rank) + " used " + test::shown(share) + " of a core";
    CHECK(share < limit);
  }

 private:
  double cpu_;
  std::chrono::steady_clock::time_point start_;
};

// The last rank comes two seconds late. The others wait to agree with it; it has nothing to do.
TEST(waiting_burns_no_core) {
  Settings settings;
  settings.stall_warning_seconds = 0.5;
  const auto engine = test::new_engine(settings);
  expect_sum_of(*engine, "before");
  MPI_Barrier(MPI_COMM_WORLD);
  const Share share;
  if (is_last()) std::this_thread::sleep_for(std::chrono::seconds(2));
  expect_sum_of(*engine, "late");
  share.expect_below(0.2);
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
}

// All ranks have submitted, but different things: they compare again and again.
TEST(disagreeing_burns_no_core) {
  const auto engine = test::new_engine();
  expect_sum_of(*engine, "before");
  MPI_Barrier(MPI_COMM_WORLD);
  const Share share;
  Call shared(Kind::allreduce, "shared"), own(Kind::allreduce, "of the others");
  shared.add(DType::float32, {4});
  own.add(DType::float32, {5});
  (is_last() ? shared : own).submit(*engine);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  (is_last() ? own : shared).submit(*engine);
  shared.expect_sum();
  own.expect_sum();
  share.expect_below(0.2);
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
}

// WaitTimes the first requests, for which the deadline is long.
std::unique_ptr<Engine> engine_with_deadline(double seconds) {
  Settings settings;
  settings.timeout_seconds = seconds;
  auto engine = test::new_engine(settings);
  for (int i = 0; i < 10; ++i) expect_sum_of(*engine, "first");
  return engine;
}

// A set may go while another thread submits to it: that is an error, or it has run.
TEST(nothing_succeeds_in_a_set_that_is_gone) {
  World& world = World::instance();
  CHECK_EQ(world.init({}, nullptr).message, "");
  std::atomic<bool> over{false};
  std::atomic<int> failed{0};
  std::thread submits([&] {
    while (!over) {
      Call call(Kind::allreduce, "of one rank");
      call.request.process_set = 1;
      call.add(DType::float32, {4}).submit(process_sets());
      const Status status = call.wait();
      if (!status.ok()) {
        ++failed;
        CHECK(status.code == Code::failed_precondition ||
              status.message.find("had removed the process set.") != std::string::npos);
      } else {
        for (int64_t i = 0; i < 4; ++i)
          CHECK_EQ(call.output<float>(0)[i], static_cast<float>(test::value(rank, 0, i)));
      }
    }
  });
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) {
    // Each may make a communicator of NCCL, which takes its time.
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(4) && failed > 0) break;
    CHECK_EQ(world.add_process_set(1, {rank}).message, "");
    world.remove_process_set(1);
  }
  over = true;
  submits.join();
  CHECK(failed > 0);
  CHECK_EQ(world.leave("the test is over", -1), LeaveResult::all_left);
}

// However long the others' scripts go on.
TEST(leaving_has_no_deadline) {
  const auto engine = engine_with_deadline(0.2);
  if (is_last()) std::this_thread::sleep_for(std::chrono::milliseconds(700));
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
}

TEST(the_deadline_ends_a_disagreement) {
  if (size == 1) return;
  const auto engine = engine_with_deadline(0.5);
  Call call(Kind::allreduce, is_last() ? "mine" : "theirs");
  call.add(DType::float32, {4}).submit(*engine);
  call.expect_error(Code::deadline_exceeded,
                    {"no progress for", "rank 0 has submitted: allreduce 'theirs'",
                     "rank " + std::to_string(size - 1) + " has submitted: allreduce 'mine'"});
  CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::aborted);
}

// One rank never submits what the others wait for: they learn its name, all in the same text, and
// so does it when it comes.
TEST(the_deadline_names_who_is_missing) {
  auto engine = engine_with_deadline(1.5);
  if (size > 1) {
    if (is_last()) std::this_thread::sleep_for(std::chrono::seconds(6));
    Call call(Kind::allreduce, "late");
    call.add(DType::float32, {4}).submit(*engine);
    call.expect_error(
        Code::deadline_exceeded,
        {"allreduce 'late' cannot run: no progress for 1 s: rank ",
         " waits for allreduce 'late', which rank " + std::to_string(size - 1) + " (on ",
         ") has not submitted"});
    CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::aborted);
    // It has messages under way, for which nobody will wait.
    static const Engine* kept;
    kept = engine.release();
    CHECK(kept != nullptr);
    if (test::device) test::device->keep();
  } else {
    CHECK_EQ(test::leave(*engine, "", -1), LeaveResult::all_left);
  }
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
