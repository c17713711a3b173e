// One thread runs all ranks: atomics are numbers.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

#include "tests/simulate/simulation.h"

namespace hvd {

template <typename T>
using SharedAtomic = ::std::atomic<T>;

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
