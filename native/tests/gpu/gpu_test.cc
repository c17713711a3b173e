// What is special about GPUs: streams, backends, faults. The collectives themselves are tested by
// the other programs, with "gpu" as their transport.
#include <atomic>
#include <csignal>
#include <map>
#include <string>
#include <thread>

#include "core/base/bytes.h"
#include "core/gpu/gpu_handshake.h"
#include "core/gpu/gpu_transport.h"
#include "core/process_sets.h"
#include "core/world.h"
#include "tests/support/kernel.h"
#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;
using test::with_engine;

bool is_last() { return rank == size - 1; }

// The fake's; null with the real libraries.
template <typename Function>
Function* hook(const char* name) {
  Function* function = nullptr;
  test::device->bind(name, &function);
  return function;
}

int groups() {
  int (*const count)() = hook<int()>("hvd_fake_cuda_groups");
  return count ? count() : -1;
}

void expect_sum_of(Engine& engine, const std::string& name) {
  Call call(Kind::allreduce, name);
  call.add(DType::float32, {4}).submit(engine);
  call.expect_sum();
}

// Launches keep an order of all sets only as long as a rank has, or expects, several.
TEST(what_is_expected_of_process_sets_ends) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto transport = test::new_transport(MPI_COMM_WORLD, ranks);
  const Waiting patient = [](double, const Missing&) { return std::string(); };
  for (const int more : {0, 1, -1}) {
    expect_process_sets(more);
    const auto flags = transport->agree({}, nullptr, patient)->flags;
    CHECK_EQ((flags & Proposal::several_sets) != 0, more > 0);
  }
}

// As a script has it, begun with the first.
void expect_sum_of_world(const std::string& name) {
  CHECK_EQ(World::instance().init({}, nullptr).message, "");
  Call call(Kind::allreduce, name);
  call.add(DType::float32, {4}).submit(process_sets());
  call.expect_sum();
}

// The framework's stream is held up until a host lets it go on: what is done() before that has
// waited for no GPU. Not so at first: CUDA and NCCL may wait for the GPU when they load a kernel.
TEST(no_host_waits_for_the_gpu) {
  static std::atomic<bool> go{false};
  using Launch = int(CudaStream, void (*)(void*), void*);
  with_engine([](Engine& engine) {
    for (const Kind kind :
         {Kind::allreduce, Kind::allgather, Kind::broadcast, Kind::alltoall, Kind::reducescatter}) {
      for (const bool held_up : {false, true}) {
        Call call(kind, held_up ? "held up" : "before");
        std::promise<void> is_done;
        call.then = [&] { is_done.set_value(); };
        call.add(DType::float32, {2 * size});
        if (kind == Kind::alltoall) call.add_splits(std::vector<int64_t>(size, 2));
        go = !held_up;
        hook<Launch>("cudaLaunchHostFunc")(
            test::device->stream(),
            [](void*) {
              while (!go) std::this_thread::sleep_for(std::chrono::microseconds(100));
            },
            nullptr);
        call.submit(engine);
        const auto ended = is_done.get_future().wait_for(std::chrono::seconds(30));
        CHECK(ended == std::future_status::ready);
        go = true;
        call.expect_ok();
        if (kind == Kind::allreduce) {
          for (int64_t i = 0; i < 2 * size; ++i) {
            float sum = 0;
            for (int r = 0; r < size; ++r) sum += static_cast<float>(test::value(r, 0, i));
            CHECK_EQ(call.output<float>(0)[i], sum);
          }
        }
      }
    }
  });
  const auto has_priority = hook<int()>("hvd_fake_cuda_has_priority");
  CHECK(!has_priority || has_priority());  // NCCL's stream, over the framework's kernels
}

// What kernels write late is summed, and later kernels get the sum.
TEST(kernels_before_and_after) {
  const OnDevice here(test::device->cuda(), test::device->number());
  test::Kernel kernel(*test::device);
  CHECK_EQ(kernel.why(), "");
  if (!kernel.why().empty()) return;
  constexpr uint32_t n = 10000;
  const size_t bytes = n * sizeof(float);
  const Memory values = test::device->pinned(bytes);
  const Memory from = test::device->allocate(bytes), in = test::device->allocate(bytes),
               sum = test::device->allocate(bytes), after = test::device->allocate(bytes);
  float* const host = static_cast<float*>(values.get());
  for (uint32_t i = 0; i < n; ++i) host[i] = static_cast<float>(i % 1000);
  test::device->copy(from.get(), host, bytes);
  with_engine([&](Engine& engine) {
    for (int step = 0; step < 5; ++step) {
      test::device->fill(in.get(), 0x55, bytes);
      kernel.launch(in.get(), from.get(), n, static_cast<float>(rank + step), 3'000'000);
      Request request;
      request.name = "late";
      request.inputs.push_back({in.get(), DType::float32, {n}});
      request.outputs.push_back(sum.get());
      request.device = test::device->number();
      request.stream = test::device->stream();
      std::promise<Status> promise;
      request.done = [&](const Status& status) { promise.set_value(status); };
      engine.submit(std::move(request));
      CHECK_EQ(promise.get_future().get().message, "");
      kernel.launch(after.get(), sum.get(), n, 1, 0);
      test::device->copy(host, after.get(), bytes);
      test::device->synchronize();
      for (uint32_t i = 0; i < n; ++i) {
        const int of_all = static_cast<int>(i % 1000) * size + size * (size - 1) / 2 + step * size;
        if (host[i] == static_cast<float>(of_all + 1)) continue;
        CHECK_EQ(host[i], static_cast<float>(of_all + 1));
        break;
      }
    }
  });
}

// A hundred requests one after another, of which nobody waits for any.
TEST(many_are_under_way) {
  with_engine([](Engine& engine) {
    std::deque<Call> calls;
    for (int i = 0; i < 100; ++i) {
      Call& call = calls.emplace_back(Kind::allreduce, "number " + std::to_string(i));
      call.add(DType::float32, {1000}).submit(engine);
    }
    for (Call& call : calls) call.expect_sum();
  });
}

// Each kind goes where its setting says; the values are the same.
TEST(the_user_chooses_the_way) {
  enum class OverMpi { all, some, none };
  for (const OverMpi way : {OverMpi::all, OverMpi::some, OverMpi::none}) {
    const bool all = way == OverMpi::all, none = way == OverMpi::none;
    Settings settings;
    if (all) settings.gpu_operations = settings.gpu_allreduce = GpuBackend::mpi;
    if (!none) settings.gpu_allgather = settings.gpu_broadcast = GpuBackend::mpi;
    const auto engine = test::new_engine(settings);
    const auto groups_of = [&](Kind kind) {
      const int before = groups();
      Call call(kind, "way");
      for (int tensor = 0; tensor < 2; ++tensor) {
        call.add(DType::int32, {size, 3});
        std::vector<int64_t> rows(size, tensor == 0 ? 1 : 0);
        if (tensor == 1) rows[0] = size;  // all to rank 0
        if (kind == Kind::alltoall) call.add_splits(rows);
      }
      call.submit(*engine);
      if (kind == Kind::allreduce) {
        call.expect_sum();
      } else if (kind == Kind::allgather) {
        call.expect_output([](size_t tensor, int64_t index) {
          return test::value(static_cast<int>(index / (3 * size)), tensor, index % (3 * size));
        });
      } else if (kind == Kind::broadcast) {
        call.expect_output(
            [](size_t tensor, int64_t index) { return test::value(0, tensor, index); });
      } else if (kind == Kind::alltoall) {
        call.expect_ok();
        for (int i = 0; i < 3 * size; ++i)
          CHECK_EQ(call.output<int32_t>(0)[i], test::value(i / 3, 0, 3 * rank + i % 3));
        for (int i = 0; rank == 0 && i < 3 * size * size; ++i)
          CHECK_EQ(call.output<int32_t>(2)[i], test::value(i / (3 * size), 2, i % (3 * size)));
      } else {
        call.expect_output([](size_t tensor, int64_t index) {
          int sum = 0;
          for (int r = 0; r < size; ++r) sum += test::value(r, tensor, 3 * rank + index);
          return sum;
        });
      }
      return groups() - before;
    };
    const bool known = groups() >= 0;
    for (const Kind kind :
         {Kind::allreduce, Kind::allgather, Kind::broadcast, Kind::alltoall, Kind::reducescatter}) {
      const bool by_nccl = none || (!all && kind != Kind::allgather && kind != Kind::broadcast);
      const int seen = groups_of(kind);
      if (known) CHECK_EQ(seen, by_nccl ? 1 : 0);
    }
    CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
  }
}

TEST(one_rank_on_its_host_is_refused) {
  if (size == 1) return;
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "mixed");
    call.on_host = is_last();
    call.add(DType::float32, {4}).submit(engine);
    call.expect_error(Code::failed_precondition,
                      {"rank 0: op=Sum float32[4], on a GPU",
                       "rank " + std::to_string(size - 1) + ": op=Sum float32[4]\n"});
    expect_sum_of(engine, "next");
  });
}

TEST(a_second_device_is_refused) {
  with_engine([](Engine& engine) {
    expect_sum_of(engine, "first");
    Call call(Kind::allreduce, "second");
    call.add(DType::float32, {4});
    call.other_device = is_last();
    call.submit(engine);
    call.expect_error(Code::invalid_argument, {"got a tensor on GPU", "A process uses one GPU"});
    expect_sum_of(engine, "third");
  });
}

// From pure introductions, what all ranks come to.
TEST(who_does_not_fit_together) {
  const auto one = [](const std::string& bus) {
    GpuInfo info;
    info.backends = backends_text(Settings());
    info.machine = "here";
    info.bus_id = bus;
    info.nccl_version = 22703;
    return info;
  };
  std::vector<GpuInfo> all = {one("a"), one("b"), one("c")};
  CHECK(negotiate(all, {4, 5, 6}).nccl);
  all[2].bus_id = "a";
  all[0].shares = all[2].shares = true;
  CHECK(negotiate(all, {4, 5, 6}).nccl);
  all[0].shares = false;
  CHECK_CONTAINS(negotiate(all, {4, 5, 6}).refusal, "rank 4 and rank 6 use the same GPU (a)");
  all[2].machine = "there";
  CHECK(negotiate(all, {4, 5, 6}).nccl);
  all[1].nccl_version = 21805;
  CHECK_CONTAINS(negotiate(all, {4, 5, 6}).refusal, "rank 4 has 2.27.3, rank 5 has 2.18.5");
  all[1].problem = "It is gone.";
  CHECK_EQ(negotiate(all, {4, 5, 6}).refusal, "");
  CHECK_CONTAINS(negotiate(all, {4, 5, 6}).warning, "rank 5 has no NCCL. It is gone.");
  CHECK(!negotiate(all, {4, 5, 6}).nccl);
  Settings settings;
  settings.gpu_broadcast = GpuBackend::mpi;
  all[2].backends = backends_text(settings);
  CHECK_CONTAINS(negotiate(all, {4, 5, 6}).refusal, "rank 6 has operations NCCL");
  all = {one("a"), one("a")};
  settings.gpu_operations = settings.gpu_allreduce = settings.gpu_allgather = GpuBackend::mpi;
  for (GpuInfo& info : all) info.backends = backends_text(settings);
  CHECK_EQ(negotiate(all, {0, 1}).refusal, "");  // they may share it
  CHECK(!negotiate(all, {0, 1}).nccl);
  CHECK_EQ(encode(decode<GpuInfo>(encode(all[1]))), encode(all[1]));
}

// All ranks get the same text, then and later, and no stream is released.
void expect_the_same_end(Engine& engine, const std::vector<std::string>& parts) {
  Call late(Kind::allreduce, "late");
  late.on_host = true;  // the stream of the framework goes no further
  late.add(DType::float32, {4});
  while (engine.leave(0) != Engine::LeaveResult::aborted)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  late.submit(engine);
  const Status status = late.wait();
  CHECK_EQ(status.code, Code::deadline_exceeded);
  for (const std::string& part : parts) CHECK_CONTAINS(status.message, part);
  std::string first = status.message;
  first.resize(2000, '\0');
  MPI_Bcast(first.data(), 2000, MPI_CHAR, 0, MPI_COMM_WORLD);
  CHECK_EQ(status.message, std::string(first.c_str()));
}

// A call whose results will never come; its memory stays, for the GPU may still use it.
Call& abandoned(const std::string& name) {
  static auto* const kept = new std::deque<Call>();
  test::device->keep();
  Call& call = kept->emplace_back(Kind::allreduce, name);
  call.add(DType::float32, {4});
  return call;
}

// The last rank's GPU stops in the middle of a collective that all have begun. All processes wait
// in their streams, and their engines have nothing to do.
void a_gpu_that_stops_ends_all() {
  const auto stop = hook<void(int)>("hvd_fake_cuda_stop");
  if (!stop || size == 1) return;
  Settings settings;
  settings.timeout_seconds = 1;
  static Engine* const engine = test::new_engine(settings).release();  // messages stay under way
  expect_sum_of(*engine, "before");
  if (is_last()) stop(-1);
  Call& call = abandoned("stopped");
  call.submit(*engine);
  while (call.times_done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  expect_the_same_end(*engine, {"no progress for 1 s", "allreduce 'stopped' on the GPU of rank",
                                "does not finish"});
  CHECK_CONTAINS(test::why_stuck, "allreduce 'stopped' on the GPU of rank");
}

// NCCL tells one rank that another has gone, in the middle of a collective.
void an_error_of_nccl_ends_all() {
  const auto stop = hook<void(int)>("hvd_fake_cuda_stop");
  const auto fail = hook<void(int, int)>("hvd_fake_cuda_fail");
  if (!stop || size == 1) return;
  static Engine* const engine = test::new_engine().release();  // messages stay under way
  expect_sum_of(*engine, "before");
  if (is_last()) stop(-1);
  Call& call = abandoned("failing");
  call.submit(*engine);
  while (call.times_done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) fail(-1, 6);
  expect_the_same_end(
      *engine, {"allreduce 'failing' on the GPU of rank 0", "remote error", "NCCL_DEBUG=INFO"});
  CHECK_CONTAINS(test::why_stuck, "remote error");
}

// This rank's GPU does nothing more of what its stream is given.
void stop_this_gpu() {
  if (const auto stop = hook<void(int)>("hvd_fake_cuda_stop")) return stop(-1);
  // A real one waits for a function that does not return.
  using Launch = int(CudaStream, void (*)(void*), void*);
  const int status = hook<Launch>("cudaLaunchHostFunc")(
      test::device->stream(),
      [](void*) {
        while (true) std::this_thread::sleep_for(std::chrono::hours(1));
      },
      nullptr);
  CHECK_EQ(status, 0);
}

// The last rank is killed in the middle of a collective that all have begun.
void a_rank_that_dies_ends_all() {
  expect_sum_of_world("before");
  Call& call = abandoned("without the last");
  if (is_last()) stop_this_gpu();
  call.submit(process_sets());
  while (call.times_done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (is_last()) raise(SIGKILL);
  test::device->synchronize();
  std::printf("went on with what nobody has computed\n");
}

// A script that waits for its stream, as one does that reads a tensor, is ended from outside.
void a_script_that_is_stuck_ends() {
  expect_sum_of_world("before");
  Call& call = abandoned("stuck");
  if (is_last()) stop_this_gpu();
  call.submit(process_sets());
  while (call.times_done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  test::device->synchronize();
  std::printf("went on with what nobody has computed\n");
}

// Takes the place of MPI's own.
int mpi_has_gpus = 0;

// What this calls may use the memory of GPUs, if MPI knows it: the host itself may not.
template <typename Function>
int in_mpi(const Function& call) {
  static const auto aware = hook<void(int)>("hvd_fake_cuda_aware_mpi");
  if (mpi_has_gpus) aware(1);
  const int status = call();
  if (mpi_has_gpus) aware(0);
  return status;
}

// Allgather and broadcast of an MPI that knows GPUs need no copies to the host, and the values are
// the same: it begins when the late inputs are there.
TEST(an_mpi_that_knows_gpus_gets_their_memory) {
  const auto copies = hook<int()>("hvd_fake_cuda_copies");
  if (!copies) return;
  for (const int yes : {0, 1}) {
    mpi_has_gpus = yes;
    Settings settings;
    settings.gpu_allgather = settings.gpu_broadcast = GpuBackend::mpi;
    const auto engine = test::new_engine(settings);
    for (const Kind kind : {Kind::allgather, Kind::broadcast}) {
      for (int i = 0; i < 5; ++i) {
        Call call(kind, "number " + std::to_string(i));
        call.in_place = kind == Kind::broadcast && i % 2 == 1;
        call.add(DType::int32, {2 + i, 3}).add(DType::int32, {2 + i, 3});
        std::promise<int> copied;
        call.then = [&] { copied.set_value(copies()); };
        call.request.root = size - 1;
        const int before = copies() + 2;  // those of the test
        call.submit(*engine);
        const bool root_copies = kind == Kind::broadcast && is_last() && !call.in_place;
        const int n = copied.get_future().get() - before;
        if (size > 1) CHECK_EQ(n, yes ? 2 * static_cast<int>(root_copies) : 4);
        const int64_t of_rank = 3 * (2 + i);
        call.expect_output([&](size_t tensor, int64_t index) {
          return kind == Kind::broadcast
                     ? test::value(size - 1, tensor, index)
                     : test::value(static_cast<int>(index / of_rank), tensor, index % of_rank);
        });
      }
    }
    CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
  }
  mpi_has_gpus = 0;
}

// One rank has no NCCL: the others have it and do not use it, and all come to the same values.
void without_nccl_all_goes_over_the_host() {
  Settings settings = test::device->settings();
  if (rank == 0) settings.nccl_library = "/there/is/none/libnccl.so.2";
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  auto mpi = std::make_unique<MpiTransport>(MPI_COMM_WORLD, ranks);
  Engine engine(std::make_unique<GpuTransport>(std::move(mpi), settings, [](const std::string&) {}),
                settings);
  expect_sum_of(engine, "staged");
  if (groups() >= 0) CHECK_EQ(groups(), 0);
  CHECK_EQ(test::leave(engine, "", -1), Engine::LeaveResult::all_left);
}

}  // namespace
}  // namespace hvd

// As an MPI has them; this program's own come before those of MPI's library. Those that move data
// or go on with it:
extern "C" {
__attribute__((visibility("default"))) int MPIX_Query_cuda_support() { return hvd::mpi_has_gpus; }

int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm communicator,
               MPI_Request* request) {
  return hvd::in_mpi([&] { return PMPI_Ibcast(data, count, type, root, communicator, request); });
}

int MPI_Iallgatherv(const void* in, int count, MPI_Datatype type, void* out, const int* counts,
                    const int* starts, MPI_Datatype to, MPI_Comm communicator,
                    MPI_Request* request) {
  return hvd::in_mpi([&] {
    return PMPI_Iallgatherv(in, count, type, out, counts, starts, to, communicator, request);
  });
}

int MPI_Testsome(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  return hvd::in_mpi([&] { return PMPI_Testsome(count, requests, done, indices, statuses); });
}

int MPI_Iprobe(int source, int tag, MPI_Comm communicator, int* found, MPI_Status* status) {
  return hvd::in_mpi([&] { return PMPI_Iprobe(source, tag, communicator, found, status); });
}
}

// The second argument names one test that needs a process of its own; none: all others.
int main(int argc, char** argv) {
  using namespace hvd;
  const std::map<std::string, test::Test> alone = {
      {"without", {"without NCCL all goes over the host", without_nccl_all_goes_over_the_host}},
      {"stops", {"a GPU that stops ends all", a_gpu_that_stops_ends_all}},
      {"stuck", {"a script that is stuck ends", a_script_that_is_stuck_ends}},
      {"dies", {"a rank that dies ends all", a_rank_that_dies_ends_all}},
      {"fails", {"an error of NCCL ends all", an_error_of_nccl_ends_all}},
  };
  const auto found = alone.find(argc > 2 ? argv[2] : "");
  if (found != alone.end()) return test::run_with_mpi(argc, argv, {found->second});
  return test::run_with_mpi(argc, argv);
}
