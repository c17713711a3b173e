#include "core/math/send.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "core/math/loops.h"

namespace hvd {

#if defined(__SSE2__)
namespace {

constexpr int64_t kPage = 4096;

// Both ways are tried after so many bytes, on average, which takes 1 % of the time of the bytes.
// The number varies, or all trials might meet the same part of each slot.
constexpr uint32_t kBytesPerTrial = 4 << 20;

// A trial writes two pages, one in each way, and times it when they are written for the second
// time. Only then have the other cores read what was written in that way. If they are not written
// again within so many bytes, others are tried.
constexpr int64_t kBytesBetween = 4 << 20;

// A trial may be interrupted, or wait for other stores, so the least times of so many count.
constexpr int kTrials = 4;

// How many times as long normal stores take where it is better to go past the caches. Measured: 1.0
// to 1.8 where the cores have a common cache, and 3 to 20 where they do not.
constexpr double kTimes = 2.5;

// Of this process: its engines send to the same cores. Races between their threads do no harm.
std::atomic<int64_t> until_trial{0};  // bytes
std::atomic<char*> tried{nullptr};    // the pages, between the first time and the second
std::atomic<uint32_t> drawn{0};       // a linear congruential generator
std::atomic<bool> nontemporal{true};
std::atomic<int> trials{0};
std::array<std::atomic<int64_t>, 2> least{INT64_MAX, INT64_MAX};  // ns, normal and past the caches

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t bytes_until_next() {
  const uint32_t draw = drawn.load(std::memory_order_relaxed) * 1664525 + 1013904223;
  drawn.store(draw, std::memory_order_relaxed);
  return kBytesPerTrial / 2 + draw / (UINT32_MAX / kBytesPerTrial);
}

// Sends two pages, one in each way, and returns the nanoseconds.
std::array<int64_t, 2> try_both(const char* from, char* to) {
  const int64_t start = now();
  std::memcpy(to, from, kPage);
  trials.fetch_add(0, std::memory_order_seq_cst);  // waits for the stores
  const int64_t between = now();
  loops().copy_nontemporal(from + kPage, kPage, to + kPage);
  return {between - start, now() - between};
}

void decide(const std::array<int64_t, 2>& times) {
  for (int way = 0; way < 2; ++way) {
    if (times[way] < least[way].load(std::memory_order_relaxed))
      least[way].store(times[way], std::memory_order_relaxed);
  }
  if (trials.fetch_add(1, std::memory_order_relaxed) + 1 < kTrials) return;
  trials.store(0, std::memory_order_relaxed);
  const auto normal = static_cast<double>(least[0].exchange(INT64_MAX, std::memory_order_relaxed));
  const auto past = static_cast<double>(least[1].exchange(INT64_MAX, std::memory_order_relaxed));
  nontemporal.store(normal > kTimes * past, std::memory_order_relaxed);
}

void copy(const char* from, int64_t bytes, char* to) {
  if (nontemporal.load(std::memory_order_relaxed)) {
    loops().copy_nontemporal(from, bytes, to);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

void send(const void* from, int64_t bytes, void* to) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  char* const end = target + bytes;
  int64_t left = until_trial.load(std::memory_order_relaxed) - bytes;
  char* pages = tried.load(std::memory_order_relaxed);
  const bool second = pages >= target && pages + 2 * kPage <= end;
  if (second || (left <= 0 && bytes >= 2 * kPage)) {
    if (!second) pages = target;
    copy(source, pages - target, target);
    source += pages - target;
    const auto times = try_both(source, pages);
    source += 2 * kPage;
    target = pages + 2 * kPage;
    if (second) decide(times);
    tried.store(second ? nullptr : pages, std::memory_order_relaxed);
    left = second ? bytes_until_next() : kBytesBetween;
  }
  until_trial.store(left, std::memory_order_relaxed);
  copy(source, end - target, target);
}

#else  // no way past the caches

void send(const void* from, int64_t bytes, void* to) { std::memcpy(to, from, bytes); }

#endif

}  // namespace hvd
