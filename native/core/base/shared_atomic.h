// Atomics in memory that ranks share, and sleep until one changes. make prove puts a model of both
// in the place of this header, so that the sources which use it are what is proven.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace hvd {

// Of one host; each reads the others' counters.
constexpr int kRanksPerGroup = 16;

template <typename T>
using SharedAtomic = std::atomic<T>;

// Sleeps while the word has this value, for less than a second. May return without a reason.
inline void futex_wait(SharedAtomic<uint32_t>* word, uint32_t value, int64_t nanoseconds) {
  const timespec limit = {0, nanoseconds};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

// Wakes the rank that sleeps.
inline void futex_wake(SharedAtomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace hvd
