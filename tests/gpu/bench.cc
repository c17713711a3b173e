// What collectives of a GPU cost and how far they overlap with kernels, beside NCCL alone and
// copies of the same bytes. Prints tables on rank 0; see tests/gpu/README.md.
#include <algorithm>
#include <cstdio>

#include "core/gpu/gpu.h"
#include "core/gpu/nccl_api.h"
#include "tests/support/kernel.h"
#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::rank;
using test::size;

const Pause kPause = [] { std::this_thread::yield(); };

// Calls that follow each other; the host waits after the last alone.
constexpr int kCalls = 50;

constexpr int64_t kLargest = 256 << 20, kLargestOfTheFake = 1 << 20;

template <typename... Arguments>
void say(const char* format, Arguments... arguments) {
  if (rank == 0) std::printf(format, arguments...);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Cost {
  double seconds = 1e9;  // until the GPU has done it
  double of_host = 1e9;  // until the host can go on
};

// Of one call, the least of some rounds: others use the machine too.
Cost cost_of(const std::function<void()>& calls, int count = kCalls) {
  Cost least;
  for (int round = 0; round < 5; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto start = std::chrono::steady_clock::now();
    calls();
    least.of_host = std::min(least.of_host, seconds_since(start) / count);
    test::device->synchronize();
    least.seconds = std::min(least.seconds, seconds_since(start) / count);
  }
  return least;
}

Request allreduce_of(const void* in, void* out, int64_t bytes, std::promise<Status>& promise) {
  Request request;
  request.name = "bench";
  request.inputs.push_back({in, DType::float32, {bytes / 4}});
  request.outputs.push_back(out);
  request.done = [&promise](const Status& status) { promise.set_value(status); };
  return request;
}

Request on_gpu(Request request) {
  request.device = test::device->number();
  request.stream = test::device->stream();
  return request;
}

Cost through_engine(Engine& engine, const void* in, void* out, int64_t bytes, bool of_gpu = true) {
  return cost_of([&] {
    std::deque<std::promise<Status>> promises(kCalls);
    for (auto& promise : promises) {
      Request request = allreduce_of(in, out, bytes, promise);
      engine.submit(of_gpu ? on_gpu(std::move(request)) : std::move(request));
    }
    for (auto& promise : promises) CHECK_EQ(promise.get_future().get().message, "");
  });
}

std::unique_ptr<NcclCommunicator> plain_communicator(const NcclApi& nccl) {
  NcclId id;
  if (rank == 0) CHECK_EQ(nccl.get_unique_id(&id), kNcclSuccess);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  return std::make_unique<NcclCommunicator>(nccl, test::device->cuda(), test::device->number(), id,
                                            rank, size, kPause);
}

Settings through_host() {
  Settings settings;
  settings.gpu_operations = settings.gpu_allreduce = GpuBackend::mpi;
  return settings;
}

// As nccl-tests have it: of an allreduce, each link carries 2 (N - 1) / N times the tensor.
double bus_gigabytes(int64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9 * 2 * (size - 1) / size;
}

// The engine beside NCCL: what it adds to the host's time, and what it takes of the bandwidth.
void allreduces() {
  std::string why;
  const NcclApi* nccl = nccl_api(test::device->settings(), &why);
  CHECK_EQ(why, "");
  if (!nccl) return;
  const OnDevice here(test::device->cuda(), test::device->number());
  const auto plain = plain_communicator(*nccl);
  const auto engine = test::new_engine();
  say("CUDA %d (%s), NCCL %s (%s), %d ranks\n", test::device->cuda().version,
      test::device->cuda().file.c_str(), nccl_version_text(nccl->version).c_str(),
      nccl->file.c_str(), size);
  say("%s\n",
      "Allreduce, microseconds a call; GB/s: 2 (N - 1) / N x bytes / time (busbw of nccl-tests)");
  say("%12s %10s %10s %10s %12s %12s %12s %10s %10s\n", "bytes", "engine", "NCCL", "copy",
      "host,engine", "host,NCCL", "host,added", "GB/s", "GB/s,NCCL");
  for (const int64_t bytes : {4LL << 10, 64LL << 10, 1LL << 20, 16LL << 20, 256LL << 20}) {
    if (test::device->is_fake() && bytes > kLargestOfTheFake) break;
    const Memory in = test::device->allocate(bytes), out = test::device->allocate(bytes);
    test::device->fill(in.get(), 0, bytes);
    const Cost ours = through_engine(*engine, in.get(), out.get(), bytes);
    const Cost alone = cost_of([&] {
      for (int i = 0; i < kCalls; ++i) {
        plain->group(
            [&] {
              plain->check(nccl->all_reduce(in.get(), out.get(), bytes / 4, 7, kNcclSum,
                                            plain->handle(), test::device->stream()),
                           "ncclAllReduce");
            },
            kPause);
      }
    });
    const Cost copy = cost_of([&] {
      for (int i = 0; i < kCalls; ++i) test::device->copy(out.get(), in.get(), bytes);
    });
    say("%12lld %10.1f %10.1f %10.1f %12.1f %12.1f %12.1f %10.2f %10.2f\n",
        static_cast<long long>(bytes), ours.seconds * 1e6, alone.seconds * 1e6, copy.seconds * 1e6,
        ours.of_host * 1e6, alone.of_host * 1e6, (ours.of_host - alone.of_host) * 1e6,
        bus_gigabytes(bytes, ours.seconds), bus_gigabytes(bytes, alone.seconds));
  }
  if (size == 1) say("%s\n", "With one GPU NCCL copies and communicates with nobody: no GB/s.");
  CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
  plain->close();
}

// What the host pays for each call that an allreduce is made of.
void calls_of_the_host() {
  std::string why;
  const NcclApi* nccl = nccl_api(test::device->settings(), &why);
  const CudaApi& cuda = test::device->cuda();
  const int number = test::device->number();
  const OnDevice here(cuda, number);
  Gpu gpu(cuda, number);
  Event event = gpu.record(gpu.stream());
  const auto each = [&](const char* what, const std::function<void()>& call) {
    const Cost cost = cost_of([&] {
      for (int i = 0; i < kCalls; ++i) call();
    });
    say("%-44s %6.2f us\n", what, cost.of_host * 1e6);
  };
  say("%s\n", "The host's part of a call");
  each("a device is selected", [&] { const OnDevice again(cuda, number); });
  each("an event is recorded", [&] { event = gpu.record(test::device->stream()); });
  each("a stream waits for it", [&] { gpu.wait(gpu.stream(), event); });
  each("an event is queried", [&] { gpu.finished(event); });
  const Memory in = test::device->allocate(4096), out = test::device->allocate(4096);
  test::device->fill(in.get(), 0, 4096);
  for (const int blocking : {1, 0}) {
    if (!blocking && test::device->is_fake()) break;
    NcclId id;
    if (rank == 0) CHECK_EQ(nccl->get_unique_id(&id), kNcclSuccess);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    NcclComm comm = nullptr;
    NcclConfig config;
    config.blocking = blocking;
    nccl->init_rank(&comm, size, id, rank, &config);
    const auto settle = [&] {
      int state = kNcclInProgress;
      while (nccl->async_error(comm, &state) == kNcclSuccess && state == kNcclInProgress) kPause();
      CHECK_EQ(state, kNcclSuccess);
    };
    settle();
    each(blocking ? "NCCL's allreduce of 4 KiB, blocking"
                  : "NCCL's allreduce of 4 KiB, not blocking",
         [&] {
           nccl->group_start();
           nccl->all_reduce(in.get(), out.get(), 1024, 7, kNcclSum, comm, test::device->stream());
           nccl->group_end();
           settle();
         });
    test::device->synchronize();
    nccl->finalize(comm);
    settle();
    nccl->destroy(comm);
  }
  const auto engine = test::new_engine();
  each("the engine's, one at a time", [&] {
    std::promise<Status> promise;
    engine->submit(on_gpu(allreduce_of(in.get(), out.get(), 4096, promise)));
    CHECK_EQ(promise.get_future().get().message, "");
  });
  CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
}

// The way through the host's memory beside copies of page-locked memory, which show the bus.
void staging() {
  const OnDevice here(test::device->cuda(), test::device->number());
  const auto engine = test::new_engine(through_host());
  say("Through the host's memory, %d ranks, GB/s of a rank\n", size);
  say("%12s %12s %12s %12s %12s %12s\n", "bytes", "to the GPU", "from it", "allreduce", "on host",
      "of the host");
  for (const int64_t bytes : {64LL << 10, 1LL << 20, 16LL << 20, 64LL << 20}) {
    if (test::device->is_fake() && bytes > kLargestOfTheFake) break;
    const Memory in = test::device->allocate(bytes), out = test::device->allocate(bytes);
    const Memory locked = test::device->pinned(bytes), sums = test::device->pinned(bytes);
    test::device->fill(in.get(), 0, bytes);
    const auto copies = [&](void* to, const void* from) {
      return cost_of([=] {
        for (int i = 0; i < kCalls; ++i) test::device->copy(to, from, bytes);
      });
    };
    const double to = copies(in.get(), locked.get()).seconds;
    const double from = copies(locked.get(), out.get()).seconds;
    const double all = through_engine(*engine, in.get(), out.get(), bytes).seconds;
    const double on_host =
        through_engine(*engine, locked.get(), sums.get(), bytes, /*of_gpu=*/false).seconds;
    const double gigabytes = static_cast<double>(bytes) / 1e9;
    say("%12lld %12.2f %12.2f %12.2f %12.2f %11.0f%%\n", static_cast<long long>(bytes),
        gigabytes / to, gigabytes / from, gigabytes / all, gigabytes / on_host,
        100 * on_host / all);
  }
  CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
}

// Holds the engines' threads until let go: what is submitted meanwhile comes after that.
class Hold {
 public:
  explicit Hold(Engine& engine) {
    Request request;
    request.kind = Kind::allgather;
    request.name = "hold";
    request.inputs.push_back({&byte_, DType::uint8, {1}});
    request.allocate = [this](size_t, const Shape&, void** data) {
      go_.get_future().wait();
      *data = bytes_.data();
      return Status();
    };
    request.done = [this](const Status& status) { done_.set_value(status); };
    engine.submit(std::move(request));
  }

  void let_go() {
    go_.set_value();
    CHECK_EQ(done_.get_future().get().message, "");
  }

 private:
  const uint8_t byte_ = 1;
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(static_cast<size_t>(size));
  std::promise<void> go_;
  std::promise<Status> done_;
};

// An allreduce and a kernel that the framework has put into its stream after the gradient's, before
// the collective is enqueued, as in backpropagation.
void overlap() {
  const OnDevice here(test::device->cuda(), test::device->number());
  test::Kernel kernel(*test::device);
  CHECK_EQ(kernel.why(), "");
  if (!kernel.why().empty()) return;
  const auto engine = test::new_engine();
  const int64_t bytes = test::device->is_fake() ? kLargestOfTheFake : kLargest;
  const Memory in = test::device->allocate(bytes), out = test::device->allocate(bytes);
  const Memory other = test::device->allocate(4);
  test::device->fill(in.get(), 0, bytes);
  test::device->fill(other.get(), 0, 4);
  uint32_t turns = 0;
  const auto compute = [&] { kernel.launch(other.get(), other.get(), 1, 1, turns); };
  const auto collective = [&](const std::function<void()>& before_it_is_enqueued) {
    return cost_of(
               [&] {
                 Hold hold(*engine);
                 std::promise<Status> promise;
                 engine->submit(on_gpu(allreduce_of(in.get(), out.get(), bytes, promise)));
                 before_it_is_enqueued();
                 hold.let_go();
                 CHECK_EQ(promise.get_future().get().message, "");
               },
               1)
        .seconds;
  };
  const double allreduce = collective([] {});
  turns = 1'000'000;
  const double million = cost_of(compute, 1).seconds;
  // As long as the allreduce of the slowest rank.
  double wanted = allreduce / million * 1e6;
  MPI_Allreduce(MPI_IN_PLACE, &wanted, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  turns = static_cast<uint32_t>(std::clamp(wanted, 1e4, 4e9));
  const double alone = cost_of(compute, 1).seconds;
  const auto hidden = [&](double both) {
    return 100 * (allreduce + alone - both) / std::min(allreduce, alone);
  };
  const double both = collective(compute);
  say("Overlap: allreduce of %lld bytes %.2f ms, a kernel %.2f ms, both %.2f ms: %.0f %% of the "
      "shorter is hidden\n",
      static_cast<long long>(bytes), allreduce * 1e3, alone * 1e3, both * 1e3, hidden(both));
  for (const bool waits : {true, false}) {
    const double after = cost_of(
                             [&] {
                               std::promise<Status> promise;
                               Request request =
                                   on_gpu(allreduce_of(in.get(), out.get(), bytes, promise));
                               request.waits = waits;
                               engine->submit(std::move(request));
                               CHECK_EQ(promise.get_future().get().message, "");
                               compute();
                               CHECK_EQ(engine->wait_in(test::device->stream()).message, "");
                             },
                             1)
                             .seconds;
    say("A kernel that comes once it is enqueued, where its stream %s: both %.2f ms, %.0f %%\n",
        waits ? "waits at once" : "waits later", after * 1e3, hidden(after));
  }
  CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
}

// Small tensors of the host, with the transport of GPUs around that of the host and without it.
void small_tensors_of_the_host() {
  if (size == 1) return;
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  auto mpi = std::make_unique<MpiTransport>(MPI_COMM_WORLD, ranks);
  const auto plain = std::make_unique<Engine>(std::make_unique<HostTransport>(&mpi), Settings());
  mpi = std::make_unique<MpiTransport>(MPI_COMM_WORLD, ranks);
  const auto with_gpus = std::make_unique<Engine>(
      std::make_unique<GpuTransport>(std::make_unique<HostTransport>(&mpi),
                                     test::device->settings(), [](const std::string&) {}),
      Settings());
  const std::vector<float> in(1024, 1.0F);
  std::vector<float> out(1024);
  const auto one_after_another = [&](Engine& engine) {
    return cost_of([&] {
             for (int i = 0; i < kCalls; ++i) {
               std::promise<Status> promise;
               engine.submit(allreduce_of(in.data(), out.data(), 4096, promise));
               CHECK_EQ(promise.get_future().get().message, "");
             }
           })
        .seconds;
  };
  double best_plain = 1e9, best_with_gpus = 1e9;
  for (int round = 0; round < 5; ++round) {
    best_plain = std::min(best_plain, one_after_another(*plain));
    best_with_gpus = std::min(best_with_gpus, one_after_another(*with_gpus));
  }
  say("4096 bytes of the host, allreduced: %.1f us, with the transport of GPUs %.1f us (%.2f)\n",
      best_plain * 1e6, best_with_gpus * 1e6, best_with_gpus / best_plain);
  for (Engine* engine : {plain.get(), with_gpus.get()})
    CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
}

}  // namespace
}  // namespace hvd

// With "gpu-host": without NCCL, so that ranks may share a GPU.
int main(int argc, char** argv) {
  using namespace hvd;
  std::vector<test::Test> tests = {{"staging", staging}};
  if (argc > 1 && std::string(argv[1]) == "gpu") {
    tests = {{"calls of the host", calls_of_the_host},
             {"allreduces", allreduces},
             {"overlap", overlap},
             {"staging", staging},
             {"small tensors of the host", small_tensors_of_the_host}};
  }
  return test::run_with_mpi(argc, argv, tests);
}
