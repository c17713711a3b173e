// Processes of a job, as fibers of one thread, on a clock of their own: a seed decides who runs
// when, what happens to whom, and so all that follows.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvd::sim {

using Nanoseconds = int64_t;
constexpr Nanoseconds kMicrosecond = 1000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr Nanoseconds kNever = INT64_MAX;

class Random {  // SplitMix64 (Steele, Lea, Flood, 2014, https://doi.org/10.1145/2660193.2660195)
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int64_t upto(int64_t last) { return static_cast<int64_t>(next() % (last + 1)); }
  bool chance(int one_in) { return upto(one_in - 1) == 0; }

 private:
  uint64_t state_;
};

struct Fiber;

// One object of each type.
class Wide {
 public:
  template <typename T>
  T& of() {
    static const char key = 0;
    auto& found = all_[&key];
    if (!found) found = std::make_shared<T>();
    return *static_cast<T*>(found.get());
  }

 private:
  std::map<const void*, std::shared_ptr<void>> all_;
};

struct Process {
  int rank = 0, host = 0;
  bool dead = false;
  bool aborted = false;              // it must not call MPI any more
  bool link_error = false;           // MPI has noticed a cut link
  bool has_news = true;              // something has come since it last slept
  Nanoseconds heard_until = kNever;  // what it has sent arrives until then
  Nanoseconds paused_until = 0;
  Nanoseconds clock_offset = 0;
  Wide wide;
  std::vector<Fiber*> fibers;
};

class Simulation {
 public:
  Simulation(uint64_t seed, bool shows);
  ~Simulation();

  Random random;
  std::vector<Process> processes;
  Nanoseconds now = 0;
  Wide wide;
  std::string violation;  // the first

  void at(Nanoseconds time, std::function<void()> action);
  Fiber* start(Process& process, std::function<void()> body);
  // Until nobody has anything to do, or the time is over.
  void run(Nanoseconds limit);
  void violate(const std::string& what);
  void trace(const std::string& text);
  bool shows() const { return shows_; }
  uint64_t hash() const { return hash_; }
  uint64_t events() const { return events_; }

  // Of the fiber that runs.
  Process& process() const;
  void sleep(Nanoseconds time);   // at least
  void block(Nanoseconds limit);  // until wake(), or for so long
  void wake(Fiber* fiber);
  Fiber* fiber() const { return current_; }
  // It asks again and again for what has not come.
  void spin();
  // Something has come for a process, whose fibers may sleep between two looks.
  void notify(Process& process);
  void kill(Process& process);  // what it has just sent may be lost

 private:
  struct Event {
    Nanoseconds time;
    uint64_t order;
    Fiber* fiber;
    uint64_t ticket;
    std::unique_ptr<std::function<void()>> action;  // without a fiber
    bool operator<(const Event& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };
  void push(Nanoseconds time, Fiber* fiber, uint64_t ticket,
            std::unique_ptr<std::function<void()>> action = nullptr);
  void resume(Fiber* fiber);
  void suspend();
  static void enter();

  const bool shows_;
  uint64_t hash_ = 0xcbf29ce484222325ULL, events_ = 0, order_ = 0;
  std::vector<Event> heap_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  jmp_buf scheduler_;
};

extern Simulation* simulation;  // the one that runs

}  // namespace hvd::sim
