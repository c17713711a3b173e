// A fake for libcudart and libnccl, for tests on machines without a GPU: the functions that
// native/core calls, over memory of the host. It computes nothing on a GPU and says nothing of how
// fast one is. It is stricter than the real ones: it ends the process when
//
//   - work uses memory that other work may still write (or read, if it writes itself), with no
//     event between the two;
//   - the host uses memory of a device, or page-locked memory that a stream may still use;
//   - the ranks of a communicator enqueue different collectives, or those of two communicators in
//     different orders;
//   - collectives of two communicators may run on a device at once, or two are created at once;
//   - operations of a group use the same memory, and one of them writes;
//   - NCCL is given memory that is not the device's, or beyond its end;
//   - a group is left open, or something is destroyed that is in use.
//
// A stream is a thread with a queue. What happens before what is known by vector clocks (Fidge,
// 1988; Mattern, 1989), one for each stream and each thread of the host, so that a missing event is
// found whatever the threads' timing is. What a program of the host does with memory is no call of
// CUDA: the memory is mapped twice, and the host's pages are protected.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

// What the test wants this function to return in place of doing its work.
#define RETURN_IF_FAULTY \
  if (const int code = fake_cuda::fault(__func__)) return code

struct CUstream_st;

namespace fake_cuda {

// How much of each stream's work, by the stream's number.
using Clock = std::map<int, uint64_t>;

// Whether that has changed the first.
bool join(Clock& clock, const Clock& other);

[[noreturn]] void violation(const std::string& text);

// Guards all that the process's fake knows; not held while work runs.
std::recursive_mutex& mutex();

// Work that is done, by its place in the stream; outlives the stream.
struct Progress {
  std::atomic<uint64_t> done{0};
};

// Things that live, by what they are: nothing may be left of them.
std::map<std::string, int64_t>& living();

// 0, or the code that a test has asked for.
int fault(const char* function);

// What this thread of the host, and those that have ended, have seen to be done.
Clock& host();
// The thread has now seen this, too; memory that nothing uses any more is the host's again.
void host_sees(const Clock& clock);

// A number in [0, below) from the seed, the rank and the caller's own stream of numbers; 0 without
// HVD_FAKE_CUDA_SEED.
class Random {
 public:
  explicit Random(uint64_t stream);
  uint64_t below(uint64_t limit);

 private:
  uint64_t state_ = 0;
};

// --- memory.cc ---

// A piece of memory that work uses.
struct Range {
  const void* data;
  size_t bytes;
  bool writes;
};

int allocate(void** out, size_t bytes, bool on_device);
int release(void* data, bool on_device);
bool is_device_memory(const void* data, size_t bytes);
bool is_pageable(const void* data);

// Where work of a stream finds what the host has at this address.
char* in_work(const void* data);

// Ends the process unless the stream's next work may use this.
void use(CUstream_st& stream, const std::string& what, const Range& range);

// For host_sees(), and after use().
void protect_all();

}  // namespace fake_cuda

struct CUstream_st {
  explicit CUstream_st(int device);
  ~CUstream_st();

  // The next place in this stream, for work that will use these ranges, enqueued by a thread of the
  // host that has seen this.
  void give(const std::string& what, const std::deque<fake_cuda::Range>& ranges,
            std::function<void()> work, const fake_cuda::Clock& seen = fake_cuda::host());

  const int number;
  const int device;
  uint64_t given = 0;
  fake_cuda::Clock clock;
  const std::shared_ptr<fake_cuda::Progress> progress = std::make_shared<fake_cuda::Progress>();

 private:
  void loop();
  void delay(fake_cuda::Random& random, uint64_t kind);

  std::mutex queue_mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ends_ = false;
  std::thread thread_;
};
