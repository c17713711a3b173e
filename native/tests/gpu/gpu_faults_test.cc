// Every call of CUDA and NCCL fails in turn, with every kind of failure. Ranks are threads, on the
// fake of CUDA and NCCL, and each case is a process of its own. What must hold then, on both ranks:
// every request ends, before long; both get the same error, which names what failed; and what is
// said to be done has been computed, or the process is ended.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "tests/support/gpu_ranks.h"

namespace hvd {
namespace {

using test::GpuCall;
using test::GpuRank;

// When a fault comes.
enum class When { at_the_start, later, on_host, joined, at_the_end };

struct Case {
  const char* function;
  When when;
  std::vector<int> codes;
  // Such an error need not have consequences: the work is done.
  bool may_be_harmless = false;
  const char* named = nullptr;  // in the error, if not the function
};

constexpr int kOutOfMemory = 2, kIllegalAddress = 700;

// NCCL's: of CUDA, of the system, of NCCL itself, wrong use, of another rank.
const std::vector<int> kNccl = {1, 2, 3, 5, 6};
const std::vector<int> kCuda = {kOutOfMemory, kIllegalAddress};

const std::vector<Case> kCases = {
    {"cudaDeviceGetPCIBusId", When::at_the_start, kCuda},
    {"cudaGetDevice", When::at_the_start, kCuda},
    {"cudaSetDevice", When::at_the_start, kCuda, true},  // afterwards, to what it was before
    {"cudaDeviceGetStreamPriorityRange", When::at_the_start, kCuda},
    {"cudaStreamCreateWithPriority", When::at_the_start, kCuda},
    {"cudaEventCreateWithFlags", When::at_the_start, kCuda},
    {"cudaEventRecord", When::later, kCuda},
    {"cudaEventQuery", When::later, kCuda},
    {"cudaStreamWaitEvent", When::later, kCuda},
    {"cudaGetDevice", When::later, kCuda},
    {"cudaMemcpyAsync", When::on_host, kCuda},
    {"cudaHostAlloc", When::on_host, kCuda},
    {"cudaMalloc", When::joined, kCuda},
    {"cudaMemcpyAsync", When::joined, kCuda},
    {"cudaStreamDestroy", When::later, kCuda, true},
    {"cudaEventDestroy", When::later, kCuda, true},
    {"cudaFree", When::joined, kCuda, true},
    {"cudaFreeHost", When::on_host, kCuda, true},
    {"ncclGetVersion", When::on_host, {1, 2}, true},   // all goes over the host
    {"ncclGetUniqueId", When::on_host, {1, 2}, true},  // all goes over the host
    {"ncclCommInitRankConfig", When::at_the_start, kNccl},
    {"ncclCommGetAsyncError", When::at_the_start, kNccl},
    {"ncclCommGetAsyncError", When::later, kNccl},
    {"ncclGroupStart", When::later, kNccl},
    {"ncclGroupEnd", When::later, kNccl},
    {"ncclRedOpCreatePreMulSum", When::later, kNccl},
    {"ncclRedOpDestroy", When::later, kNccl, true},
    {"ncclAllReduce", When::later, kNccl},
    {"ncclReduce", When::later, kNccl},
    {"ncclReduceScatter", When::later, kNccl},
    {"ncclBroadcast", When::later, kNccl},
    {"ncclAllGather", When::later, kNccl},
    {"ncclSend", When::later, kNccl},
    {"ncclRecv", When::later, kNccl},
    {"ncclCommFinalize", When::later, kNccl, true},
    {"ncclCommDestroy", When::later, kNccl, true},
    {"cuda", When::later, {kIllegalAddress}, false, "CUDA refuses"},  // and all calls after that
    {"state", When::later, kNccl, false, "on the GPU of rank 0 (on here) failed"},
    {"stop", When::later, {0}, false, "does not finish"},
    {"stop", When::at_the_end, {0}, false, "does not finish"},
    {"never settle", When::at_the_start, {0}, false, "in the middle of allreduce '0'"},
    {"never settle", When::later, {0}, false, "allreduce '1'"},
    {"settle", When::at_the_start, kNccl, false, "NCCL refuses ncclCommInitRankConfig"},
    {"settle", When::later, kNccl, false, "NCCL refuses ncclGroupEnd"},
};

template <typename Function>
Function* hook(const test::Device& device, const char* name) {
  Function* function = nullptr;
  device.bind(name, &function);
  return function;
}

// The results of a rank's requests, in order.
struct Outcome {
  std::vector<std::string> messages;  // "": it is done
  std::string why_stuck;              // if the process would be ended
};

// The requests of a case, and what comes of them on a rank.
class Script {
 public:
  Script(GpuRank& rank, When when)
      : rank_(rank),
        when_(when),
        immune_(*hook<void(int)>(rank.device, "hvd_fake_cuda_immune")),
        arm_(*hook<int(const char*, int, int, int)>(rank.device, "hvd_fake_cuda_fault")) {
    immune_(1);
  }

  bool run(const char* function, int calls, int code, test::Hub& hub, Outcome* outcome) {
    const auto arm = [&] {
      const Waiting patience = [](double, const Missing&) { return std::string(); };
      hub.exchange(rank_.rank, nullptr, patience);
      if (rank_.rank == 1) begin_fault(function, calls, code);
      hub.exchange(rank_.rank, nullptr, patience);
    };
    Engine& engine = *rank_.sets[0];
    if (when_ == When::at_the_start || when_ == When::on_host) {
      arm();
    } else {
      add(Kind::allreduce, 4, 1);
      submit(engine);
      if (!wait_for_all(outcome)) return false;
      rank_.device.synchronize();  // nothing else is under way when the fault comes
      arm();
    }
    if (when_ == When::joined) {
      if (rank_.rank == 0) {
        add(Kind::allreduce, 4, 1);
        add(Kind::reducescatter, 5, 1);
      }
      add(Kind::join, 0, 1);
    } else if (when_ == When::on_host) {
      for (const Kind kind : {Kind::allreduce, Kind::allgather, Kind::allreduce}) add(kind, 4, 2);
    } else {
      add(Kind::allreduce, 4, 2);
      add(Kind::allgather, 4, 1);
      add(Kind::allgather, 3, 1);
      add(Kind::broadcast, 4, 1);
      add(Kind::alltoall, 4, 1);
      add(Kind::reducescatter, 4, 1);
      add(Kind::reducescatter, 5, 2);
      add(Kind::allreduce, 4, 1);
    }
    submit(engine);
    if (!wait_for_all(outcome)) return false;
    const bool asynchronous =
        std::strcmp(function, "stop") == 0 || std::strcmp(function, "state") == 0;
    const auto start = std::chrono::steady_clock::now();
    while (asynchronous && when_ == When::later &&
           engine.leave(0) != Engine::LeaveResult::aborted) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(60)) return false;
    }
    add(Kind::barrier, 0, 1);  // by now both know
    submit(engine);
    if (!wait_for_all(outcome)) return false;
    engine.announce_leaving("the case is over");
    if (!rank_.stuck) engine.leave(20);
    return true;
  }

  // Of the requests that are done, if the script can go on.
  void expect_values(const Outcome& outcome) {
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (outcome.messages[i].empty()) calls_[i].fetch();
    }
    rank_.device.synchronize();
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (outcome.messages[i].empty()) calls_[i].expect_values(when_ == When::joined && i > 0);
    }
  }

  // Ends the engine, and with it the communicator.
  void close() {
    immune_(0);
    rank_.sets.clear();
    immune_(1);
  }

  // Whether the framework's stream has not been released.
  bool stream_waits() {
    const CudaApi& cuda = rank_.device.cuda();
    const OnDevice here(cuda, rank_.device.number());
    CudaEvent event = nullptr;
    cuda.check(cuda.create_event(&event, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
    cuda.check(cuda.record_event(event, rank_.device.stream()), "cudaEventRecord");
    return cuda.query_event(event) == kCudaNotReady;
  }

  bool is_to_come() { return arm_("", 0, 0, 0) != 0; }

 private:
  // The asynchronous ones have no function: rank 1's GPU stops in the middle of what both have
  // begun, and NCCL says so on rank 0, or nobody does; or what NCCL begins on rank 1 stays in
  // progress, or fails while the host waits for it.
  void begin_fault(const std::string& function, int calls, int code) {
    if (function == "never settle" || function == "settle") {
      hook<void(int, int)>(rank_.device, "hvd_fake_cuda_unsettle")(1,
                                                                   code ? code : kNcclInProgress);
    } else if (function == "stop") {
      hook<void(int)>(rank_.device, "hvd_fake_cuda_stop")(1);
    } else if (function == "state") {
      hook<void(int)>(rank_.device, "hvd_fake_cuda_stop")(1);
      std::thread([this, code] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        hook<void(int, int)>(rank_.device, "hvd_fake_cuda_fail")(0, code);
      }).detach();
    } else {
      arm_(function.c_str(), calls, code, function == "cuda");
    }
  }

  void add(Kind kind, int64_t rows, double factor) {
    // A rank that joins has fewer calls before that than the other.
    const bool alone = kind == Kind::join || kind == Kind::barrier;
    calls_.emplace_back(rank_.device, kind, alone ? "last" : std::to_string(calls_.size()),
                        rank_.rank, rows, factor);
  }

  void submit(Engine& engine) {
    for (; submitted_ < calls_.size(); ++submitted_) {
      calls_[submitted_].begin();
      immune_(0);
      calls_[submitted_].submit(engine);
      immune_(1);
    }
  }

  bool wait_for_all(Outcome* outcome) {
    for (size_t i = outcome->messages.size(); i < calls_.size(); ++i) {
      Status status;
      if (!calls_[i].wait(&status, &rank_.stuck)) {
        if (!rank_.stuck) return false;
        status.message = rank_.why_stuck;  // NCCL still has the engine's thread
      }
      outcome->messages.push_back(status.message);
    }
    return true;
  }

  GpuRank& rank_;
  const When when_;
  void (&immune_)(int);
  int (&arm_)(const char*, int, int, int);
  std::deque<GpuCall> calls_;
  size_t submitted_ = 0;
};

// Without the request's own name: the reason.
std::string reason(const std::string& message) {
  const std::string between = " cannot run: ";
  const size_t at = message.find(between);
  return at == std::string::npos ? message : message.substr(at + between.size());
}

constexpr int kNotReached = 42;  // an exit status: the function is called less often

// One case, in a process of its own. Returns its exit status.
int run_case(const Case& one, int calls, int code) {
  Settings settings;
  settings.timeout_seconds = 2;
  settings.first_timeout_seconds = 2;
  if (one.when == When::on_host && one.function[0] == 'c')
    settings.gpu_operations = settings.gpu_allreduce = settings.gpu_allgather = GpuBackend::mpi;
  Outcome outcomes[test::kGpuRanks];
  bool reached = true;
  test::Hub hub(test::kGpuRanks);
  const Waiting patience = [](double, const Missing&) { return std::string(); };
  test::on_gpu_ranks(1, settings, [&](GpuRank& rank) {
    auto* const script = new Script(rank, one.when);  // stays: a stream may use its memory
    Outcome& outcome = outcomes[rank.rank];
    if (!script->run(one.function, calls, code, hub, &outcome)) {
      std::printf("rank %d waits for ever\n", rank.rank);
      std::fflush(stdout);
      _exit(1);
    }
    hub.exchange(rank.rank, nullptr, patience);
    const bool failed = std::any_of(outcome.messages.begin(), outcome.messages.end(),
                                    [](const std::string& message) { return !message.empty(); });
    if (!failed) script->close();
    hub.exchange(rank.rank, nullptr, patience);
    if (rank.rank == 0) reached = !script->is_to_come();
    hub.exchange(rank.rank, nullptr, patience);
    if (one.when == When::at_the_end) CHECK(script->stream_waits());
    if (!rank.stuck) script->expect_values(outcome);
    outcome.why_stuck = rank.why_stuck;
    hub.exchange(rank.rank, nullptr, patience);
    if (failed) new auto(std::move(rank.sets));
  });
  if (!reached) return kNotReached;
  std::string why[test::kGpuRanks];
  for (int r = 0; r < test::kGpuRanks; ++r) why[r] = reason(outcomes[r].messages.back());
  CHECK_EQ(why[0], why[1]);
  // The group that failed then may be in the stream, so its tensors must not be used again.
  if (std::strcmp(one.function, "settle") == 0 && one.when == When::later)
    CHECK_CONTAINS(outcomes[1].why_stuck, one.named);
  if (one.when == When::at_the_end) {
    for (const Outcome& outcome : outcomes) CHECK_CONTAINS(outcome.why_stuck, one.named);
  } else if (why[0].empty()) {  // at most single requests have failed, the same on both
    if (one.when != When::joined) CHECK(outcomes[0].messages == outcomes[1].messages);
    bool failed = false;
    for (const std::string& message : outcomes[0].messages) {
      failed |= !message.empty();
      if (!message.empty()) CHECK_CONTAINS(message, one.function);
    }
    // Later polls may come when all is done.
    const bool is_poll = std::strcmp(one.function, "ncclCommGetAsyncError") == 0 ||
                         std::strcmp(one.function, "cudaEventQuery") == 0;
    CHECK(failed || one.may_be_harmless || (is_poll && calls > 0));
  } else {
    CHECK_CONTAINS(why[0], one.named ? one.named : one.function);
    for (const Outcome& outcome : outcomes) {
      for (const std::string& message : outcome.messages) {
        if (message.empty()) continue;
        // A device that refuses every call may do so before the first reason is known.
        if (std::strcmp(one.function, "cuda") == 0)
          CHECK_CONTAINS(message, one.named);
        else
          CHECK_EQ(reason(message), why[0]);
      }
    }
  }
  return test::failures ? 1 : 0;
}

// Returns the status of a process that runs the case; it has a minute.
int in_a_process(const Case& one, int calls, int code) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    test::failures = 0;
    const int status = run_case(one, calls, code);
    std::fflush(stdout);
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool all_calls = false;  // or the first of each function

TEST(every_call_fails_in_turn) {
  int cases = 0;
  for (const Case& one : kCases) {
    const bool is_call =
        std::strncmp(one.function, "cuda", 4) == 0 || std::strncmp(one.function, "nccl", 4) == 0;
    const int codes = static_cast<int>(one.codes.size());
    const int most = !all_calls ? 1 : is_call ? 12 : codes;
    for (int calls = 0; calls < most; ++calls) {
      const int code = one.codes[calls % codes];
      const int status = in_a_process(one, calls, code);
      if (status == kNotReached && calls > 0) break;
      ++cases;
      test::report(status == 0, __FILE__, __LINE__,
                   std::string(one.function) + ", after " + std::to_string(calls) +
                       " calls, returns " + std::to_string(code) + ", in case " +
                       std::to_string(static_cast<int>(one.when)) + ": status " +
                       std::to_string(status));
    }
  }
  std::printf("%d cases\n", cases);
}

}  // namespace
}  // namespace hvd

// With an argument: the first calls of each function, not only the first one.
int main(int argc, char**) {
  hvd::all_calls = argc > 1;
  return hvd::test::run();
}
