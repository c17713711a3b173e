// That the fake for CUDA and NCCL finds what is wrong: each misuse, in a process of its own,
// must end it with the right words, and the right use must not.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>

#include "core/gpu/nccl_api.h"
#include "tests/support/device.h"

namespace hvd {
namespace {

const Pause kPause = [] { std::this_thread::yield(); };

// One rank on one device, with a stream and two pieces of memory.
struct Rank {
  explicit Rank(const NcclId& id, int rank = 0, int size = 1)
      : device(rank), communicator(api(), device.cuda(), device.number(), id, rank, size, kPause) {}

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
  const Memory values = rank.device.pinned(400), result = rank.device.pinned(400);
  const Memory in = rank.device.allocate(400), out = rank.device.allocate(400);
  std::fill_n(static_cast<float*>(values.get()), 100, 1.0F);
  rank.device.copy(in.get(), values.get(), 400);
  if (wait_for_input) gpu.wait(gpu.stream(), gpu.record(rank.device.stream()));
  rank.communicator.group([&] { rank.reduce(in.get(), out.get(), 100, gpu.stream()); }, kPause);
  if (wait_for_output) gpu.wait(rank.device.stream(), gpu.record(gpu.stream()));
  rank.device.copy(result.get(), out.get(), 400);
  rank.device.synchronize();
  CHECK_EQ(static_cast<float*>(result.get())[99], 1.0F);
  rank.communicator.close();
}

TEST(events_between_streams) {
  CHECK_EQ(said([] { use_in_two_streams(true, true); }), "");
  CHECK_CONTAINS(said([] { use_in_two_streams(false, true); }),
                 "'NCCL' in stream 2 uses memory that 'copy' in stream 1 writes, with no event");
  CHECK_CONTAINS(said([] { use_in_two_streams(true, false); }),
                 "'copy' in stream 1 uses memory that 'NCCL' in stream 2 writes, with no event");
}

// What the host sees of page-locked memory and of a device's, before and after it has waited.
TEST(what_the_host_uses) {
  const auto use = [](bool wait, bool write, bool of_device) {
    test::Device device(0);
    const Memory locked = device.pinned(400), memory = device.allocate(400);
    char* const host = static_cast<char*>(of_device ? memory.get() : locked.get());
    device.copy(write ? memory.get() : locked.get(), write ? locked.get() : memory.get(), 400);
    if (wait) device.synchronize();
    write ? void(host[7] = 1) : void(CHECK_EQ(host[7], '\x55'));
    device.synchronize();
  };
  for (const bool write : {false, true}) {
    CHECK_EQ(said([&] { use(true, write, false); }), "");
    CHECK_CONTAINS(said([&] { use(false, write, false); }),
                   "the host uses memory that 'copy' in stream 1 may still use");
    CHECK_CONTAINS(said([&] { use(true, write, true); }), "the host uses memory of a device");
  }
}

// Another thread than the one that has waited must not go on as if it had.
TEST(one_thread_of_the_host_waits_for_another) {
  const auto copies = [](bool same_thread) {
    test::Device device(0);
    Gpu gpu(device.cuda(), 0);
    const Memory locked = device.pinned(400), memory = device.allocate(400);
    device.fill(memory.get(), 1, 400);
    if (same_thread) device.synchronize();
    std::atomic<bool> waited{same_thread}, copied{false};
    std::thread other([&] {
      if (!same_thread) device.synchronize();
      waited = true;
      while (!copied) std::this_thread::yield();
    });
    while (!waited) std::this_thread::yield();
    gpu.copy(locked.get(), memory.get(), 400);
    copied = true;
    other.join();
    const Event end = gpu.record(gpu.stream());
    while (!gpu.finished(end)) std::this_thread::yield();
  };
  CHECK_EQ(said([&] { copies(true); }), "");
  CHECK_CONTAINS(said([&] { copies(false); }), "uses memory that 'memset' in stream 1 writes");
}

// Two communicators of two ranks, which are threads with a device each.
TEST(two_communicators) {
  const auto both = [](bool same_order, bool one_after_another) {
    const NcclId ids[] = {new_id(), new_id()};
    test::in_threads(2, [&](int r) {
      Rank first(ids[0], r, 2), second(ids[1], r, 2);
      const Memory memory = first.device.allocate(400), other = first.device.allocate(400);
      const bool swap = r == 1 && !same_order;
      Rank& one = swap ? second : first;
      Rank& two = swap ? first : second;
      one.communicator.group(
          [&] { one.reduce(memory.get(), memory.get(), 100, one.device.stream()); }, kPause);
      Gpu gpu(one.device.cuda(), one.device.number());
      if (one_after_another) gpu.wait(two.device.stream(), gpu.record(one.device.stream()));
      two.communicator.group(
          [&] { two.reduce(other.get(), other.get(), 100, two.device.stream()); }, kPause);
      for (Rank* rank : {&one, &two}) {
        rank->device.synchronize();
        rank->device.keep();
      }
      for (Rank* rank : {&first, &second}) rank->communicator.close();
    });
  };
  CHECK_EQ(said([&] { both(true, true); }), "");
  CHECK_CONTAINS(said([&] { both(true, false); }), "may run on a device at once");
}

TEST(memory_of_the_host_or_too_little) {
  const auto reduce = [](bool on_device, size_t count) {
    Rank rank(new_id());
    const Memory memory = rank.device.allocate(400);
    std::vector<float> host(100);
    void* const data = on_device ? memory.get() : host.data();
    rank.communicator.group([&] { rank.reduce(data, data, count, rank.device.stream()); }, kPause);
    rank.device.synchronize();
    rank.communicator.close();
  };
  CHECK_EQ(said([&] { reduce(true, 100); }), "");
  CHECK_CONTAINS(said([&] { reduce(false, 100); }), "memory that is not the device's");
  CHECK_CONTAINS(said([&] { reduce(true, 101); }), "memory that is not the device's");
}

// Two ranks as threads of one process.
TEST(ranks_that_differ) {
  const auto both = [](size_t count_of_last) {
    const NcclId id = new_id();
    test::in_threads(2, [&](int r) {
      Rank rank(id, r, 2);
      const Memory memory = rank.device.allocate(400);
      rank.communicator.group(
          [&] {
            rank.reduce(memory.get(), memory.get(), r == 0 ? 100 : count_of_last,
                        rank.device.stream());
          },
          kPause);
      rank.device.synchronize();
      rank.communicator.close();
      rank.device.keep();  // the other thread's things live
    });
  };
  CHECK_EQ(said([&] { both(100); }), "");
  CHECK_CONTAINS(said([&] { both(99); }), "ranks enqueue different collectives");
}

TEST(an_open_group) {
  CHECK_CONTAINS(said([] {
                   Rank rank(new_id());
                   rank.communicator.api().group_start();
                   rank.communicator.close();
                 }),
                 "a group was left open");
}

TEST(operations_of_a_group) {
  const auto both = [](int64_t between) {
    Rank rank(new_id());
    const Memory memory = rank.device.allocate(400);
    float* const data = static_cast<float*>(memory.get());
    rank.communicator.group(
        [&] {
          rank.reduce(data, data, 50, rank.device.stream());
          rank.reduce(data + between, data + between, 50, rank.device.stream());
        },
        kPause);
    rank.device.synchronize();
    rank.communicator.close();
  };
  CHECK_EQ(said([&] { both(50); }), "");
  CHECK_CONTAINS(said([&] { both(49); }), "two operations of a group use the same memory");
}

TEST(communicators_that_are_not_ready) {
  CHECK_CONTAINS(said([] {
                   test::Device device(0);
                   for (int i = 0; i < 2; ++i) {
                     std::thread([] {
                       NcclConfig config;
                       NcclComm made = nullptr;
                       Rank::api().init_rank(&made, 2, new_id(), 0, &config);
                     }).detach();
                   }
                   std::this_thread::sleep_for(std::chrono::seconds(10));
                 }),
                 "two communicators of a device are created at once");
  CHECK_CONTAINS(said([] {
                   Rank rank(new_id());
                   Rank::api().destroy(rank.communicator.handle());
                 }),
                 "a communicator is destroyed that is in use");
}

TEST(what_is_left) {
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

int main() { return hvd::test::run(); }
