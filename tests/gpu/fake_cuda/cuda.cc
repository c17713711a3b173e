// The part of libcudart.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct CUevent_st {
  int device;
  bool recorded = false;
  uint64_t place = 0;
  std::shared_ptr<fake_cuda::Progress> progress;
  fake_cuda::Clock clock;
};

namespace fake_cuda {
namespace {

// Who used a piece of memory last.
struct Use {
  int stream = -1;
  uint64_t place = 0;
  std::string what;
};

struct Region {
  size_t bytes;
  bool on_device;
  Use written;
  std::map<int, Use> read;  // by stream
};

std::map<const char*, Region>& regions() {
  static auto* regions = new std::map<const char*, Region>();
  return *regions;
}

// What the host has seen to be done; all its threads as one.
Clock& host() {
  static auto* clock = new Clock();
  return *clock;
}

thread_local int current_device = 0;
constexpr int kDevices = 2;

std::pair<const char*, Region*> region_of(const void* data) {
  const char* address = static_cast<const char*>(data);
  auto after = regions().upper_bound(address);
  if (after == regions().begin()) return {nullptr, nullptr};
  auto& [start, region] = *--after;
  if (address >= start + region.bytes) return {nullptr, nullptr};
  return {start, &region};
}

int allocate(void** out, size_t bytes, bool on_device) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  if (posix_memalign(out, 256, bytes) != 0) return 2;  // cudaErrorMemoryAllocation
  char* memory = static_cast<char*>(*out);
  std::memset(memory, 0x55, bytes);  // so that tests do not find what was there before
  regions()[memory] = {bytes, on_device, {}, {}};
  ++living()[on_device ? "device memory" : "pinned memory"];
  return 0;
}

int release(void* data, bool on_device) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  if (!data) return 0;
  const auto found = regions().find(static_cast<const char*>(data));
  if (found == regions().end() || found->second.on_device != on_device)
    violation("memory is freed that was not allocated so");
  const auto check = [&](const Use& use) {
    if (use.stream >= 0 && host()[use.stream] < use.place)
      violation("memory is freed that '" + use.what + "' may still use");
  };
  check(found->second.written);
  for (const auto& [stream, use] : found->second.read) check(use);
  regions().erase(found);
  std::free(data);
  --living()[on_device ? "device memory" : "pinned memory"];
  return 0;
}

void use(CUstream_st& stream, const std::string& what, const CUstream_st::Range& range) {
  if (range.bytes == 0) return;
  const auto [start, region] = region_of(range.data);
  if (!region) return;  // the host's own memory
  if (static_cast<const char*>(range.data) + range.bytes > start + region->bytes)
    violation("'" + what + "' goes beyond the end of its memory");
  const auto after = [&](const Use& other, const char* did) {
    if (other.stream < 0 || stream.clock[other.stream] >= other.place) return;
    violation("'" + what + "' in stream " + std::to_string(stream.number) + " uses memory that '" +
              other.what + "' in stream " + std::to_string(other.stream) + " " + did +
              ", with no event between the two");
  };
  after(region->written, "writes");
  const Use now{stream.number, stream.given, what};
  if (range.writes) {
    for (const auto& [number, other] : region->read) after(other, "reads");
    region->read.clear();
    region->written = now;
  } else {
    region->read[stream.number] = now;
  }
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, place] : other) clock[stream] = std::max(clock[stream], place);
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

bool is_device_memory(const void* data, size_t bytes) {
  const auto [start, region] = region_of(data);
  return region && region->on_device &&
         static_cast<const char*>(data) + bytes <= start + region->bytes;
}

}  // namespace fake_cuda

using fake_cuda::violation;

namespace {
int streams = 0;
}

CUstream_st::CUstream_st(int on) : number(++streams), device(on), thread_([this] { loop(); }) {}

CUstream_st::~CUstream_st() {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CUstream_st::give(const std::string& what, const std::deque<Range>& ranges,
                       std::function<void()> work) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  fake_cuda::join(clock, fake_cuda::host());
  clock[number] = ++given;
  for (const Range& range : ranges) fake_cuda::use(*this, what, range);
  std::lock_guard<std::mutex> queue_lock(queue_mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void CUstream_st::loop() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    ++progress->done;
    lock.lock();
  }
}

EXPORT int cudaRuntimeGetVersion(int* version) {
  *version = 12080;
  return 0;
}

EXPORT const char* cudaGetErrorString(int) { return "an error of the fake"; }

EXPORT int cudaGetDeviceCount(int* count) {
  *count = fake_cuda::kDevices;
  return 0;
}

EXPORT int cudaGetDevice(int* device) {
  *device = fake_cuda::current_device;
  return 0;
}

EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device >= fake_cuda::kDevices) return 101;  // cudaErrorInvalidDevice
  fake_cuda::current_device = device;
  return 0;
}

// Each process has its own devices.
EXPORT int cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, bytes, "%d:%d", static_cast<int>(getpid()), device);
  return 0;
}

EXPORT int cudaStreamCreateWithFlags(CUstream_st** stream, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  *stream = new CUstream_st(fake_cuda::current_device);
  ++fake_cuda::living()["stream"];
  return 0;
}

EXPORT int cudaStreamDestroy(CUstream_st* stream) {
  if (stream->progress->done < stream->given) violation("a stream is destroyed that has work");
  delete stream;
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  --fake_cuda::living()["stream"];
  return 0;
}

EXPORT int cudaStreamSynchronize(CUstream_st* stream) {
  uint64_t place;
  fake_cuda::Clock clock;
  {
    std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
    place = stream->given;
    clock = stream->clock;
  }
  while (stream->progress->done < place) std::this_thread::sleep_for(std::chrono::microseconds(50));
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  fake_cuda::join(fake_cuda::host(), clock);
  return 0;
}

EXPORT int cudaStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (!event->recorded) return 0;
  fake_cuda::join(stream->clock, event->clock);
  stream->give("wait for an event", {}, [progress = event->progress, place = event->place] {
    while (progress->done < place) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  return 0;
}

EXPORT int cudaEventCreateWithFlags(CUevent_st** event, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  *event = new CUevent_st{fake_cuda::current_device, false, 0, nullptr, {}};
  ++fake_cuda::living()["event"];
  return 0;
}

EXPORT int cudaEventDestroy(CUevent_st* event) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  delete event;
  --fake_cuda::living()["event"];
  return 0;
}

EXPORT int cudaEventRecord(CUevent_st* event, CUstream_st* stream) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (event->device != stream->device) return 400;  // cudaErrorInvalidResourceHandle
  event->recorded = true;
  event->place = stream->given;
  event->progress = stream->progress;
  event->clock = stream->clock;
  return 0;
}

EXPORT int cudaEventQuery(CUevent_st* event) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  if (event->recorded && event->progress->done < event->place) return 600;  // cudaErrorNotReady
  fake_cuda::join(fake_cuda::host(), event->clock);
  return 0;
}

EXPORT int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int,
                           CUstream_st* stream) {
  stream->give("copy", {{source, bytes, false}, {target, bytes, true}},
               [=] { std::memcpy(target, source, bytes); });
  return 0;
}

EXPORT int cudaMemsetAsync(void* target, int value, size_t bytes, CUstream_st* stream) {
  stream->give("memset", {{target, bytes, true}}, [=] { std::memset(target, value, bytes); });
  return 0;
}

EXPORT int cudaLaunchHostFunc(CUstream_st* stream, void (*function)(void*), void* data) {
  stream->give("function of the host", {}, [=] { function(data); });
  return 0;
}

EXPORT int cudaMalloc(void** out, size_t bytes) { return fake_cuda::allocate(out, bytes, true); }
EXPORT int cudaFree(void* data) { return fake_cuda::release(data, true); }
EXPORT int cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return fake_cuda::allocate(out, bytes, false);
}
EXPORT int cudaFreeHost(void* data) { return fake_cuda::release(data, false); }

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
