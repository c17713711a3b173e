// The model of shared atomics: Relacy chooses who runs next and which of the stores that the C++
// memory model allows a load returns. An object is the number of one of its atomics, in memory of
// zeros; each operation knows its line, whose order may be weakened.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvd::model {

enum class Op { load, store, change };

struct Site {
  int line;
  Op op;
  std::memory_order order;
};

uint64_t load(uint32_t* id, const Site& site);
void store(uint32_t* id, uint64_t value, const Site& site);
uint64_t exchange(uint32_t* id, uint64_t value, const Site& site);
uint64_t add(uint32_t* id, uint64_t value, const Site& site);
bool compare_exchange(uint32_t* id, uint64_t* expected, uint64_t value, const Site& site);
void wait(uint32_t* id, uint64_t value);
void wake(uint32_t* id);

}  // namespace hvd::model

namespace hvd {

// All ranks, or all but the last.
inline int kRanksPerGroup;

template <typename T>
class SharedAtomic {
 public:
  using Order = std::memory_order;
  SharedAtomic(T = 0) {}

  T load(Order order, int line = __builtin_LINE()) const {
    return static_cast<T>(model::load(&id, {line, model::Op::load, order}));
  }
  void store(T value, Order order, int line = __builtin_LINE()) {
    model::store(&id, value, {line, model::Op::store, order});
  }
  T exchange(T value, Order order, int line = __builtin_LINE()) {
    return static_cast<T>(model::exchange(&id, value, {line, model::Op::change, order}));
  }
  T fetch_add(T value, Order order, int line = __builtin_LINE()) {
    return static_cast<T>(model::add(&id, value, {line, model::Op::change, order}));
  }
  T fetch_sub(T value, Order order, int line = __builtin_LINE()) {
    return static_cast<T>(model::add(&id, -uint64_t{value}, {line, model::Op::change, order}));
  }
  bool compare_exchange_strong(T& expected, T value, Order order = std::memory_order_seq_cst,
                               int line = __builtin_LINE()) {
    uint64_t found = expected;
    const bool equal =
        model::compare_exchange(&id, &found, value, {line, model::Op::change, order});
    expected = static_cast<T>(found);
    return equal;
  }

  mutable uint32_t id = 0;
};

inline void futex_wait(SharedAtomic<uint32_t>* word, uint32_t value, int64_t) {
  model::wait(&word->id, value);
}
inline void futex_wake(SharedAtomic<uint32_t>* word) { model::wake(&word->id); }

}  // namespace hvd
