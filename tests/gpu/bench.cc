// What a collective of a GPU costs through the engine, beside NCCL alone and a copy of the same
// bytes. Prints a table on rank 0; see tests/gpu/README.md.
#include <algorithm>
#include <cstdio>

#include "core/gpu/nccl_communicator.h"
#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::rank;
using test::size;

const Pause kPause = [] { std::this_thread::yield(); };

// Calls that follow each other; the host waits after the last alone.
constexpr int kCalls = 50;

// Seconds of one call, the least of some rounds: others use the machine too.
double seconds_of(const std::function<void()>& calls) {
  double least = 1e9;
  for (int round = 0; round < 5; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto start = std::chrono::steady_clock::now();
    calls();
    test::device->synchronize();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    least = std::min(least, took.count() / kCalls);
  }
  return least;
}

double through_engine(Engine& engine, const void* in, void* out, int64_t bytes) {
  return seconds_of([&] {
    std::vector<std::future<Status>> ends;
    std::deque<std::promise<Status>> promises;
    for (int i = 0; i < kCalls; ++i) {
      Request request;
      request.name = "bench";
      request.inputs.push_back({in, DType::float32, {bytes / 4}});
      request.outputs.push_back(out);
      request.device = test::device->number();
      request.stream = test::device->stream();
      std::promise<Status>& promise = promises.emplace_back();
      ends.push_back(promise.get_future());
      request.done = [&promise](const Status& status) { promise.set_value(status); };
      engine.submit(std::move(request));
    }
    for (auto& end : ends) CHECK_EQ(end.get().message, "");
  });
}

std::unique_ptr<NcclCommunicator> plain_communicator(const NcclApi& nccl) {
  NcclId id;
  if (rank == 0) CHECK_EQ(nccl.get_unique_id(&id), kNcclSuccess);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  return std::make_unique<NcclCommunicator>(nccl, id, rank, size, kPause);
}

void table() {
  std::string why;
  const NcclApi* nccl = nccl_api(test::device->settings(), &why);
  CHECK_EQ(why, "");
  if (!nccl) return;
  const OnDevice here(test::device->cuda(), test::device->number());
  const auto plain = plain_communicator(*nccl);
  const auto by_nccl = test::new_engine();
  Settings over_host;
  over_host.gpu_operations = over_host.gpu_allreduce = GpuBackend::mpi;
  const auto by_host = test::new_engine(over_host);
  const char* (*leaks)() = nullptr;
  test::device->bind("hvd_fake_cuda_leaks", &leaks);
  if (rank == 0) {
    if (leaks) std::printf("THE STAND-IN, NO GPU: these figures mean nothing.\n");
    std::printf("CUDA %d (%s), NCCL %s (%s), %d ranks; microseconds a call\n",
                test::device->cuda().version, test::device->cuda().file.c_str(),
                nccl_version_text(nccl->version).c_str(), nccl->file.c_str(), size);
    std::printf("%12s %12s %12s %12s %12s %14s\n", "bytes", "engine", "NCCL alone", "copy",
                "over host", "engine, GB/s");
  }
  for (const int64_t bytes : {4LL << 10, 64LL << 10, 1LL << 20, 16LL << 20, 256LL << 20}) {
    if (leaks && bytes > 1 << 20) break;
    const Memory in = test::device->allocate(bytes), out = test::device->allocate(bytes);
    test::device->fill(in.get(), 0, bytes);
    const double engine = through_engine(*by_nccl, in.get(), out.get(), bytes);
    const double alone = seconds_of([&] {
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
    const double copy = seconds_of([&] {
      for (int i = 0; i < kCalls; ++i) test::device->copy(out.get(), in.get(), bytes);
    });
    const double staged = through_engine(*by_host, in.get(), out.get(), bytes);
    if (rank == 0) {
      std::printf("%12lld %12.1f %12.1f %12.1f %12.1f %14.2f\n", static_cast<long long>(bytes),
                  engine * 1e6, alone * 1e6, copy * 1e6, staged * 1e6,
                  static_cast<double>(bytes) / engine / 1e9);
    }
  }
  CHECK_EQ(test::leave(*by_nccl, "", -1), Engine::LeaveResult::all_left);
  CHECK_EQ(test::leave(*by_host, "", -1), Engine::LeaveResult::all_left);
  plain->close(kPause);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) {
  return hvd::test::run_with_mpi(argc, argv, {{"time of a call", hvd::table}});
}
