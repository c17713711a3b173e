#include "core/cpu/host_counters.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/clock.h"
#include "core/base/shared_atomic.h"

namespace hvd {
namespace {

constexpr size_t kReasonBytes = 4000;
constexpr int64_t kPage = 4096;

// Long enough for a rank that arrives slightly later; a wake-up by the kernel costs as much.
constexpr double kSpinSeconds = 50e-6;

// How often a sleeping rank checks whether to abort.
constexpr int64_t kAbortCheckNanoseconds = 10'000'000;

// How long a rank that aborts waits for the reason of one that does so, too.
constexpr double kWriteReasonSeconds = 1.0;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" does nothing on most cores
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

struct HostCounters::Header {
  SharedAtomic<uint32_t> aborted{0};  // 1: a rank writes the reason, 2: written
  char reason[kReasonBytes];
  alignas(64) SharedAtomic<uint32_t> sleepers{0};
};

struct HostCounters::Counters {
  // On cache lines of their own, since others read one while this rank writes another.
  struct alignas(64) Counter {
    SharedAtomic<uint64_t> value{0};
  };
  std::array<Counter, kKinds> counters;
};

struct HostCounters::PerRank : Counters {
  alignas(64) SharedAtomic<uint32_t> asleep{0};  // a futex: 0 wakes this rank
  std::array<SharedAtomic<uint64_t>, kKinds> targets{};
};

int HostCounters::groups(int ranks) {
  return ranks > kRanksPerGroup ? (ranks - 1) / kRanksPerGroup + 1 : 0;
}

int64_t HostCounters::bytes(int ranks) {
  static_assert(sizeof(Header) <= 2 * kPage);
  return 2 * kPage + static_cast<int64_t>(sizeof(PerRank)) * ranks +
         static_cast<int64_t>(sizeof(Counters)) * groups(ranks);
}

HostCounters::HostCounters(void* memory, int rank, std::vector<int> ranks, int ranks_per_core)
    : ranks_(std::move(ranks)),
      rank_(rank),
      ranks_per_core_(ranks_per_core),
      header_(static_cast<Header*>(memory)),
      per_rank_(reinterpret_cast<PerRank*>(static_cast<char*>(memory) + 2 * kPage)),
      per_group_(reinterpret_cast<Counters*>(per_rank_ + ranks_.size())) {}

template <typename Of>
uint64_t HostCounters::least(const Of* counters, Kind kind, int from, int to) {
  uint64_t least = UINT64_MAX;
  for (int i = from; i < to; ++i)
    least = std::min(least, counters[i].counters[kind].value.load(std::memory_order_seq_cst));
  return least;
}

uint64_t HostCounters::least(Kind kind, int ranks) const {
  return least(per_rank_, kind, 0, ranks);
}

uint64_t HostCounters::least(Kind kind) const {
  const int count = groups(size());
  return count > 0 ? least(per_group_, kind, 0, count) : least(kind, size());
}

bool HostCounters::reached(const Targets& targets) const {
  for (int kind = 0; kind < kKinds; ++kind) {
    if (targets[kind] != kNever && least(static_cast<Kind>(kind)) >= targets[kind]) return true;
  }
  return false;
}

// Sequentially consistent, like what wait() does before it sleeps, or a wake-up could be lost: the
// rank whose store is last in the total order sees all other counters and all ranks that sleep.
// No order in this file can be weaker: see native/tests/prove.
void HostCounters::advance(Kind kind, uint64_t value) {
  per_rank_[rank_].counters[kind].value.store(value, std::memory_order_seq_cst);
  if (groups(size()) > 0) {
    raise(rank_ / kRanksPerGroup, kind);
  } else {
    wake(kind);
  }
}

// Increases the counter of a group to the least of its ranks'. Of ranks that increase theirs at
// once, the one whose store is last sees all.
void HostCounters::raise(int group, Kind kind) {
  const int first = group * kRanksPerGroup;
  const uint64_t to = least(per_rank_, kind, first, std::min(first + kRanksPerGroup, size()));
  SharedAtomic<uint64_t>& counter = per_group_[group].counters[kind].value;
  uint64_t is = counter.load(std::memory_order_relaxed);
  while (is < to) {
    if (counter.compare_exchange_strong(is, to, std::memory_order_seq_cst)) return wake(kind);
  }
}

void HostCounters::wake(Kind kind) {
  if (header_->sleepers.load(std::memory_order_seq_cst) == 0) return;
  const uint64_t reached = least(kind);
  for (int r = 0; r < size(); ++r) {
    PerRank& other = per_rank_[r];
    if (other.asleep.load(std::memory_order_seq_cst) == 0 ||
        other.targets[kind].load(std::memory_order_relaxed) > reached)
      continue;
    if (other.asleep.exchange(0, std::memory_order_relaxed) == 1) futex_wake(&other.asleep);
  }
}

bool HostCounters::wait_briefly(const Targets& targets) const {
  if (reached(targets)) return true;
  const auto start = Clock::now();
  do {
    if (ranks_per_core_ > 1) sched_yield();
    for (int i = 0; i < (ranks_per_core_ > 1 ? 1 : 50); ++i) {
      if (reached(targets)) return true;
      pause();
    }
  } while (seconds_since(start) < kSpinSeconds * ranks_per_core_);
  return false;
}

void HostCounters::wait(const Targets& targets, const Waiting& waiting) {
  if (wait_briefly(targets)) return;
  auto turned = Clock::now();
  double waited = 0;
  PerRank& mine = per_rank_[rank_];
  for (int kind = 0; kind < kKinds; ++kind)
    mine.targets[kind].store(targets[kind], std::memory_order_relaxed);
  while (true) {
    header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    mine.asleep.store(1, std::memory_order_seq_cst);
    const bool here = reached(targets);
    if (!here) futex_wait(&mine.asleep, 1, kAbortCheckNanoseconds);
    mine.asleep.store(0, std::memory_order_relaxed);
    header_->sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (here || reached(targets)) return;
    check_aborted();
    const double turn = seconds_since(turned);
    turned = Clock::now();
    if (turn <= kStoppedSeconds) waited += turn;
    for (int g = 0; g < groups(size()); ++g) {
      // For a rank that was stopped before it did.
      for (int kind = 0; kind < kKinds; ++kind) raise(g, static_cast<Kind>(kind));
    }
    const std::string why = waiting(waited, [&] { return missing(targets); });
    if (!why.empty()) abort(why);
  }
}

// The ranks that have not reached what is waited for.
std::vector<int> HostCounters::missing(const Targets& targets) const {
  std::vector<int> missing;
  for (int r = 0; r < size(); ++r) {
    for (int kind = 0; kind < kKinds; ++kind) {
      if (targets[kind] == kNever ||
          per_rank_[r].counters[kind].value.load(std::memory_order_relaxed) >= targets[kind])
        continue;
      missing.push_back(ranks_[r]);
      break;
    }
  }
  return missing;
}

bool HostCounters::aborted() const { return header_->aborted.load(std::memory_order_acquire) == 2; }

void HostCounters::check_aborted() const {
  if (aborted()) throw Aborted(header_->reason);
}

void HostCounters::abort(const std::string& why) {
  uint32_t nobody = 0;
  if (header_->aborted.compare_exchange_strong(nobody, 1, std::memory_order_relaxed)) {
    const size_t n = std::min(why.size(), kReasonBytes - 1);
    std::memcpy(header_->reason, why.data(), n);
    header_->reason[n] = '\0';
    header_->aborted.store(2, std::memory_order_release);
    for (int r = 0; r < size(); ++r) {
      per_rank_[r].asleep.store(0, std::memory_order_relaxed);
      futex_wake(&per_rank_[r].asleep);
    }
    throw Aborted(why);
  }
  const auto start = Clock::now();
  while (!aborted() && seconds_since(start) < kWriteReasonSeconds) sched_yield();
  header_->aborted.store(2, std::memory_order_release);  // if the rank that writes it was killed
  throw Aborted(*header_->reason ? header_->reason : why);
}

}  // namespace hvd
