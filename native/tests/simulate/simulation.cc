#include "tests/simulate/simulation.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hvd::sim {
namespace {

constexpr size_t kStackBytes = 256 << 10;

// How much later than asked for a fiber may wake up that finds nothing to do.
constexpr Nanoseconds kMostOversleep = 30 * kMillisecond;

std::vector<char*> free_stacks;

struct Exceptions {  // __cxa_eh_globals: those that this fiber has caught and not left yet
  void* caught = nullptr;
  unsigned uncaught = 0;
};

}  // namespace

Simulation* simulation = nullptr;

struct Fiber {
  Process* process;
  std::function<void()> body;
  char* stack = nullptr;
  jmp_buf where;
  Exceptions exceptions;
  uint64_t ticket = 0;  // changes with each wake-up
  bool started = false, over = false, polls = false;
  Nanoseconds earliest = 0;
  int spins = 0;
};

Simulation::Simulation(uint64_t seed, bool shows) : random(seed), shows_(shows) {
  simulation = this;
}

Simulation::~Simulation() {
  for (const auto& fiber : fibers_)
    if (fiber->stack) free_stacks.push_back(fiber->stack);
  simulation = nullptr;
}

void Simulation::push(Nanoseconds time, Fiber* fiber, uint64_t ticket,
                      std::unique_ptr<std::function<void()>> action) {
  heap_.push_back({std::max(time, now), order_++, fiber, ticket, std::move(action)});
  std::push_heap(heap_.begin(), heap_.end());
}

void Simulation::at(Nanoseconds time, std::function<void()> action) {
  push(time, nullptr, 0, std::make_unique<std::function<void()>>(std::move(action)));
}

Fiber* Simulation::start(Process& process, std::function<void()> body) {
  auto& fiber = fibers_.emplace_back(std::make_unique<Fiber>());
  fiber->process = &process;
  fiber->body = std::move(body);
  process.fibers.push_back(fiber.get());
  push(now + random.upto(20) * kMicrosecond, fiber.get(), 0);
  return fiber.get();
}

void Simulation::enter() {
  Fiber* const self = simulation->current_;
  self->body();
  self->body = nullptr;
  self->over = true;
  simulation->suspend();
}

void Simulation::resume(Fiber* fiber) {
  current_ = fiber;
  ++fiber->ticket;
  fiber->polls = false;
  std::memcpy(static_cast<void*>(abi::__cxa_get_globals()), &fiber->exceptions, sizeof(Exceptions));
  if (_setjmp(scheduler_) == 0) {
    if (fiber->started) _longjmp(fiber->where, 1);
    fiber->started = true;
    if (free_stacks.empty()) {
      void* const memory = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      free_stacks.push_back(static_cast<char*>(memory));
    }
    fiber->stack = free_stacks.back();
    free_stacks.pop_back();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Simulation::enter, 0);
    setcontext(&context);
  }
  std::memcpy(&fiber->exceptions, static_cast<void*>(abi::__cxa_get_globals()), sizeof(Exceptions));
  std::memset(static_cast<void*>(abi::__cxa_get_globals()), 0, sizeof(Exceptions));
  current_ = nullptr;
}

void Simulation::suspend() {
  if (_setjmp(current_->where) == 0) _longjmp(scheduler_, 1);
}

void Simulation::run(Nanoseconds limit) {
  while (!heap_.empty() && violation.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Event event = std::move(heap_.back());
    heap_.pop_back();
    now = std::max(now, event.time);
    if (now > limit) return violate("the job has not ended");
    if (event.action) {
      (*event.action)();
      continue;
    }
    const Process& process = *event.fiber->process;
    if (event.ticket != event.fiber->ticket || event.fiber->over || process.dead) continue;
    if (process.paused_until > now) {
      if (process.paused_until != kNever) push(process.paused_until, event.fiber, event.ticket);
      continue;
    }
    ++events_;
    resume(event.fiber);
  }
}

void Simulation::violate(const std::string& what) {
  if (!violation.empty()) return;
  violation = what;
  trace("VIOLATION " + what);
}

void Simulation::trace(const std::string& text) {
  hash_ = (hash_ ^ static_cast<uint64_t>(now)) * 0x100000001b3ULL;
  for (const unsigned char c : text) hash_ = (hash_ ^ c) * 0x100000001b3ULL;
  if (shows_)
    std::printf("%11.6f %s%s\n", static_cast<double>(now) / kSecond,
                current_ ? ("rank " + std::to_string(process().rank) + ": ").c_str() : "",
                text.c_str());
}

Process& Simulation::process() const { return *current_->process; }

void Simulation::block(Nanoseconds limit) {
  if (limit != kNever)
    push(now + limit + random.upto(50) * kMicrosecond, current_, current_->ticket);
  suspend();
}

void Simulation::wake(Fiber* fiber) {
  push(now + random.upto(30) * kMicrosecond, fiber, fiber->ticket);
}

void Simulation::sleep(Nanoseconds time) {
  Process& own = process();
  Nanoseconds more = random.upto(20) * kMicrosecond;
  if (!own.has_news && time >= 100 * kMicrosecond) {
    more += random.upto(kMostOversleep);
    current_->polls = true;
    current_->earliest = now + time;
  }
  own.has_news = false;
  current_->spins = 0;
  push(now + time + more, current_, current_->ticket);
  suspend();
}

void Simulation::spin() {
  if (++current_->spins % 50 != 0) return;
  push(now + std::min<Nanoseconds>(current_->spins * 2 * kMicrosecond, 10 * kMillisecond), current_,
       current_->ticket);
  suspend();
}

void Simulation::notify(Process& process) {
  process.has_news = true;
  for (Fiber* fiber : process.fibers) {
    if (!fiber->polls) continue;
    fiber->polls = false;
    push(std::max(fiber->earliest, now) + random.upto(20) * kMicrosecond, fiber, fiber->ticket);
  }
}

void Simulation::kill(Process& process) {
  process.dead = true;
  process.heard_until = std::min(process.heard_until, now + random.upto(2 * kMillisecond));
}

}  // namespace hvd::sim
