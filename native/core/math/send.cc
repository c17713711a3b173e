#include "core/math/send.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "core/math/loops.h"

namespace hvd {
namespace {

constexpr int64_t kPage = 4096;

// After so many bytes, on average, both ways are tried, which takes 1 % of the time of the bytes.
// The number varies, or all trials might meet the same part of each slot.
constexpr uint32_t kBytesPerTrial = 2 << 20;

// How many times as long normal stores must take to be given up, or at most take to be resumed.
// While they are in use, a page by normal stores takes 1 to 4 times as long where the cores share a
// cache, and 10 to 25 times where they do not. While they are not, both vary more, because the
// reader holds fewer of the lines: 1 to 9 and 4 to 20 times.
constexpr int64_t kGivenUp = 7, kResumed = 3;

// Either trial may have been interrupted.
constexpr int kAgreeing = 2;

// Of this process: its engines send to the same cores. Races between their threads do no harm.
std::atomic<int64_t> until_trial{0};  // bytes
std::atomic<uint32_t> drawn{0};       // a linear congruential generator
std::atomic<bool> nontemporal{true};
std::atomic<int> votes{0};  // of the last trials, for a change

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Sends two pages, one in each way.
void try_both(const char* from, char* to) {
  const int64_t start = now();
  std::memcpy(to, from, kPage);
  votes.fetch_add(0, std::memory_order_seq_cst);  // waits for the stores
  const int64_t between = now();
  loops().copy_nontemporal(from + kPage, kPage, to + kPage);
  const int64_t normal = between - start, past_caches = now() - between;
  const bool is = nontemporal.load(std::memory_order_relaxed);
  const bool ought = normal > (is ? kResumed : kGivenUp) * past_caches;
  const int before = votes.load(std::memory_order_relaxed);
  const bool changes = is != ought && before + 1 == kAgreeing;
  votes.store(is == ought || changes ? 0 : before + 1, std::memory_order_relaxed);
  if (changes) nontemporal.store(ought, std::memory_order_relaxed);
}

}  // namespace

void send(const void* from, int64_t bytes, void* to) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  int64_t left = until_trial.load(std::memory_order_relaxed) - bytes;
  if (left <= 0 && bytes >= 2 * kPage) {
    try_both(source, target);
    source += 2 * kPage;
    target += 2 * kPage;
    bytes -= 2 * kPage;
    const uint32_t draw = drawn.load(std::memory_order_relaxed) * 1664525 + 1013904223;
    drawn.store(draw, std::memory_order_relaxed);
    left = kBytesPerTrial / 2 + draw / (UINT32_MAX / kBytesPerTrial);
  }
  until_trial.store(left, std::memory_order_relaxed);
  if (nontemporal.load(std::memory_order_relaxed)) {
    loops().copy_nontemporal(source, bytes, target);
  } else {
    std::memcpy(target, source, bytes);
  }
}

}  // namespace hvd
