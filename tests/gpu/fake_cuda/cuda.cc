// The part of libcudart.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_cuda.h"

struct CUevent_st {
  int device;
  bool recorded = false;
  uint64_t place = 0;
  std::shared_ptr<fake_cuda::Progress> progress;
  fake_cuda::Clock clock;
};

namespace fake_cuda {
namespace {

thread_local int current_device = 0;
thread_local bool immune = false;  // to faults
constexpr int kDevices = 2;
constexpr int kGreatestPriority = -5;

// What threads that have ended had seen: whoever goes on has waited for them.
Clock& ended() {
  static auto* clock = new Clock();
  return *clock;
}

struct HostThread {
  Clock clock;
  ~HostThread() {
    std::lock_guard<std::recursive_mutex> lock(mutex());
    join(ended(), clock);
  }
};

struct Fault {
  std::string function;
  int calls;  // that still succeed
  int code;
  bool for_ever;
  bool came = true;
};

Fault& next_fault() {
  static auto* fault = new Fault();
  return *fault;
}

void sleep_us(uint64_t time) { std::this_thread::sleep_for(std::chrono::microseconds(time)); }

std::map<int, CUstream_st*>& streams() {
  static auto* streams = new std::map<int, CUstream_st*>();
  return *streams;
}

// As a real device does when memory is freed, and for copies of memory that is not page-locked.
void wait_for(const Progress& progress, uint64_t place) {
  while (progress.done < place) sleep_us(50);
}

void wait_for_device(int device) {
  std::vector<std::pair<std::shared_ptr<Progress>, uint64_t>> all;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex());
    for (const auto& [number, stream] : streams()) {
      if (stream->device == device) all.emplace_back(stream->progress, stream->given);
    }
  }
  for (const auto& [progress, place] : all) wait_for(*progress, place);
}

}  // namespace

bool join(Clock& clock, const Clock& other) {
  bool changed = false;
  for (const auto& [stream, place] : other) {
    uint64_t& own = clock[stream];
    changed |= own < place;
    own = std::max(own, place);
  }
  return changed;
}

void violation(const std::string& text) {
  std::fprintf(stderr, "fake: %s\n", text.c_str());
  std::fflush(stderr);
  std::abort();
}

std::recursive_mutex& mutex() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}

std::map<std::string, int64_t>& living() {
  static auto* living = new std::map<std::string, int64_t>();
  return *living;
}

Clock& host() {
  thread_local HostThread thread;
  std::lock_guard<std::recursive_mutex> lock(mutex());
  join(thread.clock, ended());
  return thread.clock;
}

int fault(const char* function) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  Fault& fault = next_fault();
  // "cuda" and "nccl" mean every function of the library.
  const size_t compared = fault.function == "cuda" || fault.function == "nccl" ? 4 : 100;
  if (immune || fault.function.empty() ||
      std::strncmp(function, fault.function.c_str(), compared) != 0)
    return 0;
  if (fault.calls > 0) return --fault.calls, 0;
  fault.came = true;
  if (!fault.for_ever) fault.function.clear();
  return fault.code;
}

Random::Random(uint64_t stream) {
  const char* seed = std::getenv("HVD_FAKE_CUDA_SEED");
  if (!seed) return;
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  state_ = (std::strtoull(seed, nullptr, 10) * 64 + (rank ? std::atoi(rank) : 0)) * 4096 + stream;
  state_ = state_ * 2 + 1;  // never zero
}

// The generator of Vigna (2014), xorshift64*.
uint64_t Random::below(uint64_t limit) {
  if (state_ == 0) return 0;
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return (state_ * 0x2545f4914f6cdd1dULL >> 33) % limit;
}

}  // namespace fake_cuda

using fake_cuda::violation;

namespace {
int made = 0;
std::atomic<int> copies{0};
std::atomic<int> most_under_way{0};
// Of this thread of the host: the places of copies in streams, by the streams' numbers.
thread_local std::map<int, std::deque<uint64_t>> under_way;
std::atomic<bool> has_priority{false};
}  // namespace

CUstream_st::CUstream_st(int on) : number(++made), device(on), thread_([this] { loop(); }) {}

CUstream_st::~CUstream_st() {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CUstream_st::give(const std::string& what, const std::deque<fake_cuda::Range>& ranges,
                       std::function<void()> work, const fake_cuda::Clock& seen) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  fake_cuda::join(clock, seen);
  clock[number] = ++given;
  for (const fake_cuda::Range& range : ranges) fake_cuda::use(*this, what, range);
  std::lock_guard<std::mutex> queue_lock(queue_mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void CUstream_st::loop() {
  fake_cuda::Random random(number);
  const uint64_t kind = random.below(3);
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    delay(random, kind);
    work();
    ++progress->done;
    lock.lock();
  }
}

// The schedule: some streams run at once, some are late at random, and some come last, that is,
// when the others have nothing to do or have been at it for some milliseconds.
void CUstream_st::delay(fake_cuda::Random& random, uint64_t kind) {
  if (kind == 1 && random.below(4) == 0) fake_cuda::sleep_us(random.below(400));
  if (kind != 2) return;
  for (int i = 0; i < 20; ++i) {
    bool others_work = false;
    {
      std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
      for (const auto& [other, stream] : fake_cuda::streams())
        others_work |= other != number && stream->progress->done < stream->given;
    }
    if (!others_work) return;
    fake_cuda::sleep_us(100);
  }
}

// The device's default stream, which PyTorch uses, is null; it waits for none of ours.
static CUstream_st* own(CUstream_st* stream) {
  if (stream) return stream;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  static CUstream_st* streams[fake_cuda::kDevices];
  CUstream_st*& found = streams[fake_cuda::current_device];
  if (!found) {
    found = new CUstream_st(fake_cuda::current_device);
    fake_cuda::streams()[found->number] = found;
  }
  return found;
}

EXPORT int cudaRuntimeGetVersion(int* version) {
  RETURN_IF_FAULTY;
  *version = 12080;
  return 0;
}

EXPORT const char* cudaGetErrorString(int) { return "an error of the fake"; }

EXPORT int cudaGetDeviceCount(int* count) {
  *count = fake_cuda::kDevices;
  return 0;
}

EXPORT int cudaGetDevice(int* device) {
  RETURN_IF_FAULTY;
  *device = fake_cuda::current_device;
  return 0;
}

EXPORT int cudaSetDevice(int device) {
  RETURN_IF_FAULTY;
  if (device < 0 || device >= fake_cuda::kDevices) return 101;  // cudaErrorInvalidDevice
  fake_cuda::current_device = device;
  return 0;
}

// Each process has its own devices.
EXPORT int cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  RETURN_IF_FAULTY;
  std::snprintf(text, bytes, "%d:%d", static_cast<int>(getpid()), device);
  return 0;
}

EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RETURN_IF_FAULTY;
  *least = 0;
  *greatest = fake_cuda::kGreatestPriority;
  return 0;
}

EXPORT int cudaStreamCreateWithFlags(CUstream_st** stream, unsigned flags) {
  RETURN_IF_FAULTY;
  if (flags != 1) violation("a stream is made that waits for the default stream");
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  *stream = new CUstream_st(fake_cuda::current_device);
  fake_cuda::streams()[(*stream)->number] = *stream;
  ++fake_cuda::living()["stream"];
  return 0;
}

EXPORT int cudaStreamCreateWithPriority(CUstream_st** stream, unsigned flags, int priority) {
  RETURN_IF_FAULTY;
  if (priority == fake_cuda::kGreatestPriority) has_priority = true;
  return cudaStreamCreateWithFlags(stream, flags);
}

EXPORT int cudaStreamDestroy(CUstream_st* stream) {
  RETURN_IF_FAULTY;
  if (stream->progress->done < stream->given) violation("a stream is destroyed that has work");
  {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    fake_cuda::streams().erase(stream->number);
    fake_cuda::join(fake_cuda::ended(), stream->clock);  // someone has waited for all of it
    --fake_cuda::living()["stream"];
  }
  delete stream;
  return 0;
}

EXPORT int cudaStreamSynchronize(CUstream_st* stream) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  uint64_t place;
  fake_cuda::Clock clock;
  {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    place = stream->given;
    clock = stream->clock;
  }
  fake_cuda::wait_for(*stream->progress, place);
  fake_cuda::host_sees(clock);
  return 0;
}

EXPORT int cudaStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (!event->recorded) return 0;
  fake_cuda::join(stream->clock, event->clock);
  stream->give("wait for an event", {}, [progress = event->progress, place = event->place] {
    fake_cuda::wait_for(*progress, place);
  });
  return 0;
}

EXPORT int cudaEventCreateWithFlags(CUevent_st** event, unsigned) {
  RETURN_IF_FAULTY;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  *event = new CUevent_st{fake_cuda::current_device, false, 0, nullptr, {}};
  ++fake_cuda::living()["event"];
  return 0;
}

EXPORT int cudaEventDestroy(CUevent_st* event) {
  RETURN_IF_FAULTY;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  delete event;
  --fake_cuda::living()["event"];
  return 0;
}

EXPORT int cudaEventRecord(CUevent_st* event, CUstream_st* stream) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (event->device != stream->device) return 400;  // cudaErrorInvalidResourceHandle
  event->recorded = true;
  event->place = stream->given;
  event->progress = stream->progress;
  event->clock = stream->clock;
  return 0;
}

EXPORT int cudaEventQuery(CUevent_st* event) {
  RETURN_IF_FAULTY;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (event->recorded && event->progress->done < event->place) return 600;  // cudaErrorNotReady
  fake_cuda::host_sees(event->clock);
  return 0;
}

EXPORT int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int kind,
                           CUstream_st* stream) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  ++copies;
  // From the host 0 or 1, from a device 2 or 3; odd to a device; 4: it follows from the addresses.
  const int found =
      2 * fake_cuda::is_device_memory(source, 1) + fake_cuda::is_device_memory(target, 1);
  if (kind != 4 && kind != found) violation("a copy in another direction than its addresses have");
  char* const to = fake_cuda::in_work(target);
  const char* const from = fake_cuda::in_work(source);
  stream->give("copy", {{source, bytes, false}, {target, bytes, true}},
               [=] { std::memcpy(to, from, bytes); });
  {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    auto& of_stream = under_way[stream->number];
    of_stream.push_back(stream->given);
    size_t busy = 0, fewest = 1000;
    for (auto& [number, places] : under_way) {
      while (!places.empty() && places.front() <= fake_cuda::host()[number]) places.pop_front();
      if (places.empty()) continue;
      ++busy;
      fewest = std::min(fewest, places.size());
    }
    if (busy > 1) most_under_way = std::max(most_under_way.load(), static_cast<int>(fewest));
  }
  const bool host_waits = fake_cuda::is_pageable(target) || fake_cuda::is_pageable(source);
  return host_waits ? cudaStreamSynchronize(stream) : 0;
}

EXPORT int cudaMemsetAsync(void* target, int value, size_t bytes, CUstream_st* stream) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  char* const to = fake_cuda::in_work(target);
  stream->give("memset", {{target, bytes, true}}, [=] { std::memset(to, value, bytes); });
  return 0;
}

EXPORT int cudaLaunchHostFunc(CUstream_st* stream, void (*function)(void*), void* data) {
  RETURN_IF_FAULTY;
  stream = own(stream);
  stream->give("function of the host", {}, [=] { function(data); });
  return 0;
}

EXPORT int cudaMalloc(void** out, size_t bytes) {
  RETURN_IF_FAULTY;
  return fake_cuda::allocate(out, bytes, true);
}

EXPORT int cudaFree(void* data) {
  RETURN_IF_FAULTY;
  const int status = fake_cuda::release(data, true);
  fake_cuda::wait_for_device(fake_cuda::current_device);
  return status;
}

EXPORT int cudaHostAlloc(void** out, size_t bytes, unsigned) {
  RETURN_IF_FAULTY;
  return fake_cuda::allocate(out, bytes, false);
}

EXPORT int cudaFreeHost(void* data) {
  RETURN_IF_FAULTY;
  return fake_cuda::release(data, false);
}

// Of the driver, for the one kernel of native/tests/support/kernel.h.
EXPORT int cuModuleLoadData(void** module, const void* assembly) {
  *module = const_cast<void*>(assembly);
  return 0;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return 0;
}

EXPORT int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, CUstream_st* stream, void** arguments, void**) {
  void* const to = *static_cast<void**>(arguments[0]);
  void* const from = *static_cast<void**>(arguments[1]);
  const uint32_t n = *static_cast<uint32_t*>(arguments[2]);
  const float term = *static_cast<float*>(arguments[3]);
  const uint32_t turns = *static_cast<uint32_t*>(arguments[4]);
  float* const out = reinterpret_cast<float*>(fake_cuda::in_work(to));
  const float* const in = reinterpret_cast<const float*>(fake_cuda::in_work(from));
  stream->give("kernel", {{from, n * sizeof(float), false}, {to, n * sizeof(float), true}}, [=] {
    fake_cuda::sleep_us(turns / 1000);
    for (uint32_t i = 0; i < n; ++i) out[i] = in[i] + term;
  });
  return 0;
}

// For tests: whether a stream of this process comes before others, how many copies it has begun,
// and the most that a thread of the host had begun, in several streams, before it has seen that
// they are done.
EXPORT int hvd_fake_cuda_has_priority() { return has_priority; }

EXPORT int hvd_fake_cuda_copies() { return copies; }

EXPORT int hvd_fake_cuda_most_under_way() { return most_under_way; }

// For tests: what is left, in words.
EXPORT const char* hvd_fake_cuda_leaks() {
  static auto* text = new std::string();
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  text->clear();
  for (const auto& [what, count] : fake_cuda::living()) {
    if (count != 0) *text += std::to_string(count) + " × " + what + "; ";
  }
  return text->c_str();
}

// For tests: after so many more calls of the function ("cuda", "nccl": of any of the library), one
// returns the code and does nothing, or all later ones. Returns whether the last one asked for is
// still to come.
EXPORT int hvd_fake_cuda_fault(const char* function, int calls, int code, int for_ever) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  const bool to_come = !fake_cuda::next_fault().came;
  fake_cuda::next_fault() = {function, calls, code, for_ever != 0, *function == '\0'};
  return to_come;
}

// For tests: the calls of this thread are the test's own, and succeed and do not count.
EXPORT void hvd_fake_cuda_immune(int yes) { fake_cuda::immune = yes != 0; }
