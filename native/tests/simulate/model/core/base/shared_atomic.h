// One thread runs all ranks: atomics are numbers, whose reads are counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

#include "tests/simulate/simulation.h"

namespace hvd {

inline int kRanksPerGroup = 2;  // small hosts have several groups
inline uint64_t shared_reads = 0;

template <typename T>
class SharedAtomic : public ::std::atomic<T> {
 public:
  using ::std::atomic<T>::atomic;
  T load(::std::memory_order order) const {
    ++shared_reads;
    return ::std::atomic<T>::load(order);
  }
};

struct FutexSleepers {
  ::std::multimap<const void*, sim::Fiber*> by_word;
};

inline auto& futex_sleepers() { return sim::simulation->wide.of<FutexSleepers>().by_word; }

inline void futex_wait(SharedAtomic<uint32_t>* word, uint32_t value, int64_t nanoseconds) {
  if (*word != value) return;
  sim::Simulation& all = *sim::simulation;
  const auto self = futex_sleepers().emplace(word, all.fiber());
  all.block(nanoseconds + all.random.upto(5 * nanoseconds));
  futex_sleepers().erase(self);
}

inline void futex_wake(SharedAtomic<uint32_t>* word) {
  const auto [begin, end] = futex_sleepers().equal_range(word);
  for (auto sleeper = begin; sleeper != end; ++sleeper) sim::simulation->wake(sleeper->second);
}

}  // namespace hvd
