// That the fake for CUDA and NCCL finds what is wrong: each misuse, in a process of its own,
// must end it with the right words, and the right use must not.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <thread>

#include "core/gpu/nccl_communicator.h"
#include "tests/support/device.h"

namespace hvd {
namespace {

// One rank on one device, with a stream and two pieces of memory.
struct Rank {
  explicit Rank(const NcclId& id, int rank = 0, int size = 1)
      : device(0), communicator(api(), id, rank, size, [] { std::this_thread::yield(); }) {}

  static const NcclApi& api() {
    Settings settings;
    std::string why;
    CHECK(read_settings(&settings).ok());
    return *nccl_api(settings, &why);
  }

  void reduce(const void* in, void* out, size_t count, CudaStream stream) {
    communicator.check(api().all_reduce(in, out, count, 7, kNcclSum, communicator.handle(), stream),
                       "all_reduce");
  }

  test::Device device;
  NcclCommunicator communicator;
};

NcclId new_id() {
  NcclId id;
  CHECK_EQ(Rank::api().get_unique_id(&id), kNcclSuccess);
  return id;
}

const Pause kPause = [] { std::this_thread::yield(); };

// What a process that runs this says on stderr.

std::string said(const std::function<void()>& body) {
  int pipe_ends[2];
  CHECK_EQ(pipe(pipe_ends), 0);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[0]);
    body();
    _exit(test::failures ? 1 : 0);
  }
  close(pipe_ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return well || !text.empty() ? text : "no reason";
}

// A copy in the framework's stream, then a sum in ours, in this or that order.
void use_in_two_streams(bool wait_for_input, bool wait_for_output) {
  Rank rank(new_id());
  Gpu gpu(rank.device.cuda(), 0);
  const std::vector<float> values(100, 1.0F);
  std::vector<float> result(100);
  const Memory in = rank.device.allocate(400), out = rank.device.allocate(400);
  rank.device.copy(in.get(), values.data(), 400);
  if (wait_for_input) gpu.wait(gpu.stream(), gpu.record(rank.device.stream()));
  rank.communicator.group([&] { rank.reduce(in.get(), out.get(), 100, gpu.stream()); }, kPause);
  if (wait_for_output) gpu.wait(rank.device.stream(), gpu.record(gpu.stream()));
  rank.device.copy(result.data(), out.get(), 400);
  rank.device.synchronize();
  CHECK_EQ(result[99], 1.0F);
  rank.communicator.close(kPause);
}

void events_between_streams() {
  CHECK_EQ(said([] { use_in_two_streams(true, true); }), "");
  CHECK_CONTAINS(said([] { use_in_two_streams(false, true); }),
                 "'NCCL' in stream 2 uses memory that 'copy' in stream 1 writes, with no event");
  CHECK_CONTAINS(said([] { use_in_two_streams(true, false); }),
                 "'copy' in stream 1 uses memory that 'NCCL' in stream 2 writes, with no event");
}

void memory_of_the_host_or_too_little() {
  const auto reduce = [](bool on_device, size_t count) {
    Rank rank(new_id());
    const Memory memory = rank.device.allocate(400);
    std::vector<float> host(100);
    void* const data = on_device ? memory.get() : host.data();
    rank.communicator.group([&] { rank.reduce(data, data, count, rank.device.stream()); }, kPause);
    rank.device.synchronize();
    rank.communicator.close(kPause);
  };
  CHECK_EQ(said([&] { reduce(true, 100); }), "");
  CHECK_CONTAINS(said([&] { reduce(false, 100); }), "memory that is not the device's");
  CHECK_CONTAINS(said([&] { reduce(true, 101); }), "memory that is not the device's");
}

// Two ranks as threads of one process.
void ranks_that_differ() {
  const auto both = [](size_t count_of_last) {
    const NcclId id = new_id();
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([=] {
        Rank rank(id, r, 2);
        const Memory memory = rank.device.allocate(400);
        rank.communicator.group(
            [&] {
              rank.reduce(memory.get(), memory.get(), r == 0 ? 100 : count_of_last,
                          rank.device.stream());
            },
            kPause);
        rank.device.synchronize();
        rank.communicator.close(kPause);
        rank.device.keep();  // the other thread's things live
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  CHECK_EQ(said([&] { both(100); }), "");
  CHECK_CONTAINS(said([&] { both(99); }), "ranks enqueue different collectives");
}

void an_open_group() {
  CHECK_CONTAINS(said([] {
                   Rank rank(new_id());
                   rank.communicator.api().group_start();
                   rank.communicator.close(kPause);
                 }),
                 "a group was left open");
}

void work_that_has_not_settled() {
  CHECK_CONTAINS(said([] {
                   Rank rank(new_id());
                   const Memory memory = rank.device.allocate(4);
                   for (int i = 0; i < 2; ++i)  // twice, without a look at how the first goes
                     rank.reduce(memory.get(), memory.get(), 1, rank.device.stream());
                 }),
                 "called before it has settled");
}

void what_is_left() {
  const auto after = [](bool keep_event) {
    const char* (*leaks)() = nullptr;
    std::string text;
    auto* const device = new test::Device(0);
    device->bind("hvd_fake_cuda_leaks", &leaks);
    CudaEvent event = nullptr;
    device->cuda().create_event(&event, kCudaEventDisableTiming);
    if (!keep_event) device->cuda().destroy_event(event);
    if (std::string(leaks()) != "1 × stream; ") std::fprintf(stderr, "%s", leaks());
  };
  CHECK_EQ(said([&] { after(false); }), "");
  CHECK_EQ(said([&] { after(true); }), "1 × event; 1 × stream; ");
}

}  // namespace
}  // namespace hvd

int main() {
  using namespace hvd;
  return test::run({
      {"events between streams", events_between_streams},
      {"memory of the host, or too little", memory_of_the_host_or_too_little},
      {"ranks that differ", ranks_that_differ},
      {"an open group", an_open_group},
      {"work that has not settled", work_that_has_not_settled},
      {"what is left", what_is_left},
  });
}
