// A rank of ../core.py, without TensorFlow: measures the cases that it is sent over a socket.
//
//   core SOCKET
//
// A case is a line: way, bytes of a piece, whether the result goes elsewhere, calls, and the
// numbers of float32 of each tensor. The answer is the seconds of one call on this rank. Compiled
// once for each side: with HVD for the engine of hvd_keras, called as a kernel calls it, with CCL
// for oneCCL, otherwise for the MPI that is linked. The ways, of which only "sum" depends on it:
//
//   sum       of all ranks
//   mpi       the same by one MPI_Allreduce
//   copy      memcpy of the bytes
//   pass      reads and writes the bytes in place
//   ping      the first tensor from rank 0 to the last rank, and back
//   messages  1,000 times the first tensor from each of these two to the other, all at once
#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#ifdef HVD
#include "core/kernel_api.h"
extern "C" int hvd_init(const int* ranks, int count, const void* communicator, double cpu_quota);
extern "C" int hvd_leave(const char* reason, double seconds);
extern "C" void hvd_finalize();
#endif
#ifdef CCL
#include <oneapi/ccl.hpp>
#endif

namespace {

using Clock = std::chrono::steady_clock;

int rank = 0, size = 1;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "rank %d: %s\n", rank, why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

struct Case {
  explicit Case(const std::string& line) {
    std::istringstream in(line);
    in >> way >> piece_bytes >> elsewhere >> calls;
    for (int64_t n; in >> n;) {
      inputs.emplace_back(n);
      if (elsewhere) outputs.emplace_back(n);
    }
    if (inputs.empty()) fail("got the case '" + line + "'");
  }

  float* out(size_t i) { return elsewhere ? outputs[i].data() : inputs[i].data(); }

  void run();       // a sum in the way of this side
  void run_bare();  // the other ways

  void exchange(int messages);

  void call() { way == "sum" ? run() : run_bare(); }

  // Small integers that differ by rank, tensor and element, so that sums are exact. Then zeros, so
  // that repeated sums in place stay finite.
  void verify() {
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (size_t k = 0; k < inputs[i].size(); ++k)
        inputs[i][k] = static_cast<float>(rank + (k % 7) * (i % 3 + 1));
    }
    call();
    for (size_t i = 0; i < inputs.size() && (way == "sum" || way == "mpi"); ++i) {
      for (size_t k = 0; k < inputs[i].size(); ++k) {
        const auto sum = static_cast<float>(size * (size - 1) / 2 + size * (k % 7) * (i % 3 + 1));
        if (out(i)[k] != sum) fail("wrong sums: " + way);
      }
    }
    for (auto* all : {&inputs, &outputs}) {
      for (std::vector<float>& tensor : *all) std::fill(tensor.begin(), tensor.end(), 0.0F);
    }
  }

  std::string way;
  int64_t piece_bytes = 0;
  int elsewhere = 0, calls = 1;
  std::vector<std::vector<float>> inputs, outputs;
};

void Case::run_bare() {
  for (size_t i = 0; i < inputs.size(); ++i) {
    float* const in = inputs[i].data();
    const auto n = static_cast<int64_t>(inputs[i].size());
    if (way == "copy") {
      std::memcpy(out(i), in, n * sizeof(float));
      __asm__ volatile("" : : "r"(out(i)) : "memory");
    } else if (way == "pass") {
      for (int64_t k = 0; k < n; ++k) in[k] += 1.0F;
      __asm__ volatile("" : : "r"(in) : "memory");
    } else if (way == "mpi") {
      MPI_Allreduce(MPI_IN_PLACE, in, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (rank == 0 || rank == size - 1) {
      exchange(way == "ping" ? 1 : 1000);
    }
  }
}

// Between the first rank and the last.
void Case::exchange(int messages) {
  const int peer = size - 1 - rank, n = static_cast<int>(inputs[0].size());
  std::vector<float> received(n);
  if (messages == 1 && rank != 0)
    MPI_Recv(received.data(), n, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  std::vector<MPI_Request> requests;
  const auto add = [&] { return &requests.emplace_back(MPI_REQUEST_NULL); };
  for (int i = 0; i < messages && (messages > 1 || rank == 0); ++i)
    MPI_Irecv(received.data(), n, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, add());
  for (int i = 0; i < messages; ++i)
    MPI_Isend(inputs[0].data(), n, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, add());
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
}

#ifdef HVD

// Waits as the script's thread does.
class Done {
 public:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    done_ = false;
  }
  void set(const hvd::Status& status) {
    if (!status.ok()) fail(status.message);
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

void start(int*, char***) {
  if (hvd_init(nullptr, 0, nullptr, INFINITY) != 0) fail("hvd_init");
}
void end() {
  hvd_leave("the benchmark is over", 60);
  hvd_finalize();
}

void Case::run() {
  static Done done;
  hvd::Request request;
  request.name = "benchmark";
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto n = static_cast<int64_t>(inputs[i].size());
    request.inputs.push_back({inputs[i].data(), hvd::DType::float32, {n}});
    request.outputs.push_back(out(i));
  }
  request.done = [](const hvd::Status& status) { done.set(status); };
  hvd::submit(std::move(request));
  done.wait();
}

#else

void start(int* argc, char*** argv) { MPI_Init(argc, argv); }

void sum(const float* in, float* out, int64_t n);

void Case::run() {
  for (size_t i = 0; i < inputs.size(); ++i) {
    float* const in = inputs[i].data();
    const auto n = static_cast<int64_t>(inputs[i].size());
    const int64_t piece = piece_bytes > 0 ? piece_bytes / 4 : n;
    for (int64_t at = 0; at < n; at += piece) sum(in + at, out(i) + at, std::min(piece, n - at));
  }
}

#ifdef CCL

ccl::communicator& communicator() {
  static ccl::communicator* made = [] {
    ccl::init();
    ccl::kvs::address_type address;
    ccl::shared_ptr_class<ccl::kvs> store;
    if (rank == 0) {
      store = ccl::create_main_kvs();
      address = store->get_address();
    }
    MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank != 0) store = ccl::create_kvs(address);
    return new ccl::communicator(ccl::create_communicator(size, rank, store));
  }();
  return *made;
}

void sum(const float* in, float* out, int64_t n) {
  ccl::allreduce(in, out, static_cast<size_t>(n), ccl::reduction::sum, communicator()).wait();
}

#else

void sum(const float* in, float* out, int64_t n) {
  MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, static_cast<int>(n), MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
}

#endif

void end() { MPI_Finalize(); }

#endif

double seconds(Case& measured) {
  measured.call();  // all ranks are ready, and the memory is back in the caches as in a loop
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begun = Clock::now();
  for (int i = 0; i < measured.calls; ++i) measured.call();
  return std::chrono::duration<double>(Clock::now() - begun).count() / measured.calls;
}

}  // namespace

int main(int argc, char** argv) {
  start(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s", argc > 1 ? argv[1] : "");
  const int link = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(link, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    fail("cannot connect");
  FILE* const lines = fdopen(dup(link), "r");
  char* line = nullptr;
  size_t room = 0;
  Case* measured = nullptr;
  for (std::string known; getline(&line, &room, lines) > 0;) {
    if (line != known || !measured) {
      delete measured;  // first, to have its memory
      measured = new Case(known = line);
      measured->verify();
    }
    dprintf(link, "%.9g\n", seconds(*measured));
  }
  delete measured;
  end();
  return 0;
}
