// How engines end: by errors, by aborts, and beside threads that still use them.
#include <deque>
#include <new>

#include "tests/support/thread_ranks.h"

namespace hvd {
namespace {

using test::Call;
using test::kRanks;
using test::leave;
using test::LeaveResult;

// Runs out of memory, once, in the method that a test names.
class Failing : public test::ThreadTransport {
 public:
  Failing(std::shared_ptr<test::Hub> hub, int rank, std::string method)
      : ThreadTransport(std::move(hub), rank), method_(std::move(method)) {}

  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override {
    fail(!waiting ? "agree at once" : next ? "agree to run" : "agree");
    return ThreadTransport::agree(mine, next, waiting);
  }
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override {
    fail("gather");
    return ThreadTransport::gather(mine, waiting);
  }
  Status run(Request& request, const Waiting& waiting) override {
    if (request.name == "fails") fail("run");
    return ThreadTransport::run(request, waiting);
  }

 private:
  void fail(const std::string& method) {
    if (method == method_) throw std::bad_alloc();
  }

  const std::string method_;
};

TEST(an_error_of_one_rank_ends_all) {
  Settings settings;
  settings.mismatch_seconds = 0.2;  // until the ranks gather what they wait for
  for (const char* method : {"agree", "agree to run", "agree at once", "gather", "run"}) {
    test::context = method;
    const auto hub = std::make_shared<test::Hub>(kRanks, 1e9);
    test::in_threads(kRanks, [&](int rank) {
      Engine engine(std::make_unique<Failing>(hub, rank, rank == 1 ? method : ""), settings);
      // Until the engine's thread waits for requests.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      // A barrier is not served at once; different requests are negotiated.
      std::deque<Call> calls;
      calls.emplace_back(Kind::allreduce, "fails", std::vector<float>{1});
      calls.emplace_back(Kind::barrier, "");
      calls.emplace_back(Kind::allgather, "of " + std::to_string(rank), std::vector<float>{1});
      Status status;
      for (Call& call : calls) {
        call.submit(engine);
        if (status = call.wait(); !status.ok()) break;
      }
      if (method == std::string("agree")) leave(engine, "");
      if (method != std::string("agree")) {
        CHECK_EQ(status.code, Code::deadline_exceeded);
        CHECK_CONTAINS(status.message, "rank 1 cannot go on: std::bad_alloc");
      }
      CHECK_EQ(leave(engine, ""), LeaveResult::aborted);
    });
  }
}

// Ranks 1 and 2 have a set of their own. When it is aborted, that of all ranks is, too.
TEST(an_abort_ends_all_sets) {
  Settings settings;
  settings.timeout_seconds = settings.first_timeout_seconds = 0.3;
  const auto all = std::make_shared<test::Hub>(kRanks), some = std::make_shared<test::Hub>(2);
  test::in_threads(kRanks, [&](int rank) {
    const auto recorder = std::make_shared<Recorder>();
    Engine of_all(std::make_unique<test::ThreadTransport>(all, rank), {}, recorder);
    if (rank > 0) {
      Engine of_some(std::make_unique<test::ThreadTransport>(some, rank - 1), settings, recorder,
                     1);
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(600));
      Call late(Kind::allreduce, "late", {1});
      CHECK_EQ(late.run(of_some).code, Code::deadline_exceeded);
      CHECK_EQ(leave(of_some, ""), LeaveResult::aborted);
    }
    Call next(Kind::allreduce, "next", {1});
    const Status status = next.run(of_all);
    CHECK_EQ(status.code, Code::deadline_exceeded);
    CHECK_CONTAINS(status.message, "waits for allreduce 'late'");
    CHECK_EQ(leave(of_all, ""), LeaveResult::aborted);
  });
}

// A framework's thread may be in done() for long after the script has seen the result.
TEST(an_engine_ends_after_those_who_submit) {
  const auto hub = std::make_shared<test::Hub>(1);
  const auto engine =
      std::make_shared<Engine>(std::make_unique<test::ThreadTransport>(hub, 0), Settings());
  std::promise<void> seen;
  std::atomic<bool> over{false};
  Call call(Kind::allreduce, "last", {1});
  call.then = [&] {
    seen.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    over = true;
  };
  std::thread framework([&, kept = engine] { call.submit(*kept); });
  seen.get_future().wait();
  CHECK_EQ(leave(*engine, ""), LeaveResult::all_left);
  engine->close();
  if (call.wait().ok()) CHECK(over);
  CHECK(hub.use_count() == 1);  // the transport is gone, although the thread has the engine
  Call late(Kind::allreduce, "late", {1});
  CHECK_EQ(late.run(*engine).code, Code::aborted);
  framework.join();
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
