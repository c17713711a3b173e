// A fake for libcudart and libnccl, for tests on machines without a GPU: the functions that
// native/core calls, over memory of the host. It computes nothing on a GPU and says nothing of how
// fast one is. It is stricter than the real ones: it ends the process when
//
//   - work uses memory that other work may still write (or read, if it writes itself), with no
//     event between the two;
//   - the ranks of a communicator enqueue different collectives;
//   - NCCL is given memory that is not the device's, or beyond its end;
//   - a group is left open, or something is destroyed that is in use.
//
// A stream is a thread with a queue. What happens before what is known by vector clocks (Fidge,
// 1988; Mattern, 1989), so that a missing event is found whatever the threads' timing is.
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

namespace fake_cuda {

// How much of each stream's work, by the stream's number.
using Clock = std::map<int, uint64_t>;

void join(Clock& clock, const Clock& other);

[[noreturn]] void violation(const std::string& text);

// Guards all that the process's fake knows; not held while work runs.
std::recursive_mutex& mutex();

// Work that is done, by its place in the stream; outlives the stream.
struct Progress {
  std::atomic<uint64_t> done{0};
};

// Things that live, by what they are: nothing may be left of them.
std::map<std::string, int64_t>& living();

bool is_device_memory(const void* data, size_t bytes);

}  // namespace fake_cuda

struct CUstream_st {
  explicit CUstream_st(int device);
  ~CUstream_st();

  // The next place in this stream, for work that will read and write these ranges.
  struct Range {
    const void* data;
    size_t bytes;
    bool writes;
  };
  void give(const std::string& what, const std::deque<Range>& ranges, std::function<void()> work);

  const int number;
  const int device;
  uint64_t given = 0;
  fake_cuda::Clock clock;
  const std::shared_ptr<fake_cuda::Progress> progress = std::make_shared<fake_cuda::Progress>();

 private:
  void loop();

  std::mutex queue_mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ends_ = false;
  std::thread thread_;
};
