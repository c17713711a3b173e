// Included before the core's sources: within hvd, std's threads, locks and clock, and the system's
// shared memory, are the simulation's.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/simulate/simulation.h"

namespace hvd {
namespace std {

using namespace ::std;

class mutex {
 public:
  // Another fiber may come first.
  void lock() {
    sim::Simulation& all = *sim::simulation;
    if (all.random.chance(8)) all.sleep(all.random.upto(all.random.chance(20) ? 5000 : 30) * 1000);
    while (held_) all.sleep(10 * sim::kMicrosecond);
    held_ = true;
  }
  void unlock() { held_ = false; }

 private:
  bool held_ = false;
};

class condition_variable {
 public:
  void notify_all() {
    for (sim::Fiber* fiber : waiting_) sim::simulation->wake(fiber);
    waiting_.clear();
  }

  template <typename Condition>
  void wait(unique_lock<mutex>& lock, const Condition& over) {
    while (!over()) block(lock, sim::kNever);
  }

  template <typename Duration, typename Condition>
  bool wait_for(unique_lock<mutex>& lock, const Duration& limit, const Condition& over) {
    const auto length = chrono::duration_cast<::std::chrono::nanoseconds>(limit).count();
    const sim::Nanoseconds end = sim::simulation->now + length;
    while (!over()) {
      if (sim::simulation->now >= end) return false;
      block(lock, end - sim::simulation->now);
    }
    return true;
  }

  template <typename Time, typename Condition>
  bool wait_until(unique_lock<mutex>& lock, const Time& limit, const Condition& over) {
    return wait_for(lock, limit - Time::clock::now(), over);
  }

 private:
  void block(unique_lock<mutex>& lock, sim::Nanoseconds limit) {
    sim::Fiber* const self = sim::simulation->fiber();
    waiting_.push_back(self);
    lock.unlock();
    sim::simulation->block(limit);
    waiting_.erase(remove(waiting_.begin(), waiting_.end(), self), waiting_.end());
    lock.lock();
  }

  vector<sim::Fiber*> waiting_;
};

class thread {
 public:
  thread() = default;
  explicit thread(function<void()> body) : state_(make_shared<State>()) {
    sim::simulation->start(sim::simulation->process(), [state = state_, body = move(body)] {
      body();
      state->over = true;
    });
  }
  void join() {
    while (!state_->over) sim::simulation->sleep(50 * sim::kMicrosecond);
  }
  pthread_t native_handle() { return 0; }

 private:
  struct State {
    bool over = false;
  };
  shared_ptr<State> state_;
};

namespace this_thread {

inline void yield() { sim::simulation->sleep(20 * sim::kMicrosecond); }

template <typename Duration>
void sleep_for(const Duration& time) {
  sim::simulation->sleep(chrono::duration_cast<::std::chrono::nanoseconds>(time).count());
}

}  // namespace this_thread

namespace chrono {

using namespace ::std::chrono;

struct steady_clock {
  using duration = nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = ::std::chrono::time_point<steady_clock>;
  static constexpr bool is_steady = true;
  static time_point now() {
    sim::Simulation& all = *sim::simulation;
    all.now += 50;
    return time_point(nanoseconds(all.now + all.process().clock_offset));
  }
};

}  // namespace chrono
}  // namespace std

inline int pthread_setname_np(pthread_t, const char*) { return 0; }
inline int sched_yield() {
  std::this_thread::yield();
  return 0;
}
// By a macro, since for its argument's sake the system's is found from within hvd, too.
#define clock_gettime simulated_clock_gettime
inline int clock_gettime(clockid_t, timespec* time) {
  *time = {0, std::chrono::steady_clock::now().time_since_epoch().count()};
  return 0;
}
inline ssize_t getrandom(void* bytes, size_t size, unsigned) {
  for (size_t i = 0; i < size; ++i)
    static_cast<char*>(bytes)[i] = static_cast<char>(sim::simulation->random.next());
  return static_cast<ssize_t>(size);
}

// In memory.cc.
int shm_open(const char* name, int flags, mode_t mode);
int shm_unlink(const char* name);
int ftruncate(int file, off_t bytes);
int posix_fallocate(int file, off_t offset, off_t bytes);
void* mmap(void* where, size_t bytes, int protection, int flags, int file, off_t offset);
int munmap(void* memory, size_t bytes);
inline int madvise(void*, size_t, int) { return 0; }
int close(int file);

}  // namespace hvd
