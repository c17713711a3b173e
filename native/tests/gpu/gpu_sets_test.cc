// Several process sets on the same GPUs, and the memory of the host beside that of GPUs: ranks are
// threads, on the fake of CUDA and NCCL, which ends the process if two ranks launch in different
// orders, or two sets at once.
#include <array>
#include <deque>

#include "core/gpu/gpu_staging.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/kernel.h"

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
// launches differ, and everything does. The framework's kernels come between them.
TEST(ranks_differ_in_their_order) {
  test::on_gpu_ranks(2, {}, [](GpuRank& rank) {
    std::deque<GpuCall> calls;
    test::Kernel kernel(rank.device);
    CHECK_EQ(kernel.why(), "");
    const Memory other = rank.device.allocate(sizeof(float));
    rank.device.fill(other.get(), 0, sizeof(float));
    for (int i = 0; i < kCalls; ++i) {
      for (int k = 0; k < 2; ++k) {
        const int set = (k + rank.rank) % 2;
        const Kind kind = i % 3 == 0 ? Kind::allgather : Kind::allreduce;
        GpuCall& call =
            calls.emplace_back(rank.device, kind, std::to_string(i) + " of " + std::to_string(set),
                               rank.rank, 2 + set);
        call.begin();
        call.submit(*rank.sets[set]);
        kernel.launch(other.get(), other.get(), 1, 1, 100'000);
      }
    }
    expect_all(rank, calls);
    calls.clear();
    leave(rank);
  });
}

// A set's request waits for another set's result on one rank, while the other rank has given it out
// long before: no order may be fixed before all ranks have the request.
TEST(one_set_waits_for_the_other) {
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

// The next request of any set comes after what another rank has seen of this one.
TEST(numbers_grow_with_those_of_other_ranks) {
  LaunchOrder order;
  const Pause never = [] { CHECK(false); };
  int64_t next = 0;
  {
    const LaunchOrder::Turn turn(
        order, 1, [](int64_t) { return std::vector<int64_t>{100}; }, never);
  }
  const auto exchange = [&](int64_t mine) { return std::vector<int64_t>{next = mine}; };
  {
    const LaunchOrder::Turn turn(order, 2, exchange, never);
  }
  CHECK_EQ(next, int64_t{101});
}

// A small allreduce of the host's memory. Returns its error; says whether the thread that has
// submitted it has also served it.
std::string reduce_on_host(GpuRank& rank, const std::string& name, bool* at_once) {
  const float in[] = {test::gpu_value(rank.rank, 0), test::gpu_value(rank.rank, 1)};
  float out[2] = {};
  std::promise<std::pair<Status, std::thread::id>> served;
  Request request;
  request.name = name;
  request.inputs.push_back({in, DType::float32, {2}});
  request.outputs.push_back(out);
  request.done = [&](const Status& status) {
    served.set_value({status, std::this_thread::get_id()});
  };
  rank.sets[0]->submit(std::move(request));
  const auto [status, thread] = served.get_future().get();
  *at_once = thread == std::this_thread::get_id();
  if (!status.ok()) return status.message;
  for (int i = 0; i < 2; ++i) CHECK_EQ(out[i], test::gpu_value(0, i) + test::gpu_value(1, i));
  return "";
}

// Float32, more than a part of what goes through the host, in place, and one element of another
// dtype before it; its values come `late`. Not of rank 1 if it has joined. Returns the error.
std::string reduce_much(GpuRank& rank, bool is_alone = false, std::chrono::milliseconds late = {}) {
  constexpr int64_t n = 5'000'000;
  const size_t bytes = n * sizeof(float);
  const Memory staged = rank.device.pinned(bytes), small = rank.device.pinned(1);
  const Memory large = rank.device.allocate(bytes), one = rank.device.allocate(1);
  auto* const values = static_cast<float*>(staged.get());
  for (int64_t i = 0; i < n; ++i) values[i] = test::gpu_value(rank.rank, i % 1000);
  *static_cast<uint8_t*>(small.get()) = static_cast<uint8_t>(3 + rank.rank);
  rank.device.copy(large.get(), staged.get(), bytes);
  rank.device.copy(one.get(), small.get(), 1);
  rank.device.delay(late);
  std::promise<Status> done;
  Request request;
  request.name = "much";
  request.inputs = {{one.get(), DType::uint8, {1}}, {large.get(), DType::float32, {n}}};
  request.outputs = {one.get(), large.get()};
  request.device = rank.device.number();
  request.stream = rank.device.stream();
  request.done = [&](const Status& status) { done.set_value(status); };
  rank.sets[0]->submit(std::move(request));
  const std::string why = done.get_future().get().message;
  if (!why.empty()) {
    new auto(std::array{staged, small, large, one});  // a stream may use them
    return why;
  }
  rank.device.copy(staged.get(), large.get(), bytes);
  rank.device.copy(small.get(), one.get(), 1);
  rank.device.synchronize();
  CHECK_EQ(static_cast<int>(*static_cast<uint8_t*>(small.get())), is_alone ? 3 : 7);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float other = is_alone ? 0 : test::gpu_value(1, i % 1000);
    wrong += values[i] != test::gpu_value(0, i % 1000) + other;
  }
  CHECK_EQ(wrong, 0);
  return "";
}

// While the host exchanges one part, others are copied.
TEST(what_goes_through_the_host_goes_in_parts) {
  Settings settings;
  settings.gpu_allreduce = GpuBackend::mpi;
  test::on_gpu_ranks(1, settings, [](GpuRank& rank) {
    int (*most_under_way)() = nullptr;
    rank.device.bind("hvd_fake_cuda_most_under_way", &most_under_way);
    CHECK_EQ(reduce_much(rank), "");
    CHECK(most_under_way() >= 2);
    std::deque<GpuCall> joins;
    joins.emplace_back(rank.device, Kind::join, "join", rank.rank, 1);
    if (rank.rank == 0) CHECK_EQ(reduce_much(rank, true), "");
    joins.back().begin();
    joins.back().submit(*rank.sets[0]);
    expect_all(rank, joins);
    leave(rank);
  });
}

TEST(only_what_has_an_element_for_each_has_parts) {
  Request request;
  request.inputs = {{nullptr, DType::float32, {5, 1'000'000}}};
  request.outputs = {nullptr};
  CHECK_EQ(parts_of(request).size(), size_t{5});
  request.reduction = Reduction::adasum;
  CHECK_EQ(parts_of(request).size(), size_t{1});
  request.reduction = Reduction::sum;
  request.kind = Kind::allgather;
  CHECK_EQ(parts_of(request).size(), size_t{1});
}

// One of the first copies, while those before it wait for the values. The streams have nothing to
// do when they are destroyed.
TEST(a_copy_that_fails_between_parts_ends_all) {
  Settings settings;
  settings.gpu_allreduce = GpuBackend::mpi;
  test::on_gpu_ranks(1, settings, [](GpuRank& rank) {
    int (*fault)(const char*, int, int, int) = nullptr;
    void (*immune)(int) = nullptr;
    rank.device.bind("hvd_fake_cuda_fault", &fault);
    rank.device.bind("hvd_fake_cuda_immune", &immune);
    immune(1);  // the test's own copies
    if (rank.rank == 0) fault("cudaMemcpyAsync", 6, 1, 0);
    CHECK_CONTAINS(reduce_much(rank, false, std::chrono::milliseconds(300)), "cudaMemcpyAsync");
    while (rank.sets[0]->leave(0) != Engine::LeaveResult::aborted)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(!rank.stuck);
    rank.sets.clear();
  });
}

std::atomic<bool> stream_is_free{false};

// Rank 1's GPU comes only after rank 0's has done something else.
TEST(a_stream_goes_on_beside_what_does_not_wait) {
  test::on_gpu_ranks(1, {}, [](GpuRank& rank) {
    using Launch = int(CudaStream, void (*)(void*), void*);
    Launch* launch = nullptr;
    rank.device.bind("cudaLaunchHostFunc", &launch);
    if (rank.rank == 1) {
      launch(
          rank.device.stream(),
          [](void*) {
            for (int i = 0; i < 10'000 && !stream_is_free; ++i)
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            CHECK(stream_is_free);
          },
          nullptr);
    }
    std::deque<GpuCall> calls;
    std::vector<std::weak_ptr<void>> memory;
    for (const char* name : {"one", "another"}) {
      GpuCall& call = calls.emplace_back(rank.device, Kind::allreduce, name, rank.rank, 4);
      call.begin();
      call.request.waits = false;
      call.request.memory = std::make_shared<int>();
      memory.push_back(call.request.memory);
      call.submit(*rank.sets[0]);
      call.request.memory = nullptr;
    }
    for (GpuCall& call : calls) {
      Status status;
      CHECK(call.wait(&status));
      CHECK_EQ(status.message, "");
    }
    if (rank.rank == 0) {
      const Memory other = rank.device.allocate(64);
      rank.device.fill(other.get(), 1, 64);
      rank.device.synchronize();
      stream_is_free = true;
    }
    for (const auto& held : memory) CHECK(!held.expired());
    CHECK_EQ(rank.sets[0]->wait_in(rank.device.stream()).message, "");
    for (GpuCall& call : calls) call.fetch();
    rank.device.synchronize();
    for (const GpuCall& call : calls) call.expect_values();
    for (const auto& held : memory) CHECK(held.expired());
    calls.clear();
    leave(rank);
  });
}

constexpr double kPatience = 30;  // seconds: nobody gives up at once

// Whether one of some is served at once: the engine's thread may still be at what was before.
bool is_served_at_once(GpuRank& rank) {
  int served = 0;
  for (int i = 0; i < 50; ++i) {
    bool at_once = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK_EQ(reduce_on_host(rank, "small", &at_once), "");
    served += at_once;
  }
  return served > 0;
}

// As without GPUs, in the thread that submits, though a GPU has work that is held up. One that
// comes after a request of a GPU keeps its place.
TEST(small_tensors_of_the_host_are_served_at_once) {
  const auto body = [](GpuRank& rank) {
    CHECK(is_served_at_once(rank));
    GpuCall held_up(rank.device, Kind::allreduce, "held up", rank.rank, 4);
    rank.device.delay(std::chrono::milliseconds(200));
    held_up.begin();
    held_up.submit(*rank.sets[0]);
    bool at_once = false;
    CHECK_EQ(reduce_on_host(rank, "after", &at_once), "");
    CHECK_EQ(held_up.times_done.load(), 1);
    Status status;
    CHECK(held_up.wait(&status));
    CHECK_EQ(status.message, "");
    CHECK(is_served_at_once(rank));
    held_up.fetch();
    rank.device.synchronize();
    held_up.expect_values();
    leave(rank);
  };
  test::on_gpu_ranks(1, {}, body, kPatience);
}

// Although the engine's thread has nothing to do.
TEST(who_is_served_at_once_hears_of_a_gpu_that_stops) {
  Settings settings;
  settings.timeout_seconds = 1;
  const auto body = [](GpuRank& rank) {
    auto* const calls = new std::deque<GpuCall>();  // stay: a stream may use their memory
    for (int i = 0; i < 2; ++i) {
      calls->emplace_back(rank.device, Kind::allreduce, std::to_string(i), rank.rank, 4);
    }
    void (*stop)(int) = nullptr;
    rank.device.bind("hvd_fake_cuda_stop", &stop);
    bool at_once = false;
    Status status;
    for (GpuCall& call : *calls) {
      call.begin();
      call.submit(*rank.sets[0]);
      CHECK(call.wait(&status));
      if (&call == &calls->back()) break;
      rank.device.synchronize();
      CHECK_EQ(reduce_on_host(rank, "the first is computed", &at_once), "");
      if (rank.rank == 1) stop(1);
    }
    std::string why;
    const auto start = std::chrono::steady_clock::now();
    while (why.empty() && std::chrono::steady_clock::now() - start < std::chrono::seconds(60))
      why = reduce_on_host(rank, "again", &at_once);
    CHECK_CONTAINS(why, "does not finish");
    while (rank.sets[0]->leave(0) != Engine::LeaveResult::aborted)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(rank.stuck);
    new auto(std::move(rank.sets));
  };
  test::on_gpu_ranks(1, settings, body, kPatience);
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
