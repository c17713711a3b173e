// Proves the protocol in shared memory of a host's ranks: HostTransport and HostCounters as they
// ship, over a model of atomics and futexes (Relacy). It runs interleavings, and for each what the
// C++ memory model lets each load return, and reports a data race, a deadlock (a lost wake-up) or a
// wrong sum. Of two ranks, all executions with a number of preemptions; of three, random ones.
// Then it weakens one memory order after another, and each must be found.
#include <ucontext.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/shared_atomic.h"
#include "core/cpu/host_transport.h"

// Relacy's threads have too small stacks.
#define makecontext(context, ...)                                   \
  ((context)->uc_stack = stack_t{std::malloc(1 << 20), 0, 1 << 20}, \
   makecontext(context, __VA_ARGS__))
#include <relacy/relacy.hpp>
// It replaces these words of the language.
#undef new
#undef delete
#undef malloc
#undef free
#undef memory_order_relaxed
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst
#undef sched_yield

extern "C" void* __real_memcpy(void* to, const void* from, size_t bytes);

namespace hvd {
namespace {

using model::Op;
using model::Site;

constexpr int kMostRanks = 3, kCells = 64;

// What the next operation at this line uses in place of its order.
Site weakened = {0, Op::load, std::memory_order_seq_cst};
std::map<std::pair<int, Op>, std::memory_order> sites;  // all that ran

std::array<std::string, kMostRanks> reasons;

// --- of one execution --------------------------------------------------------------------------

using Cell = rl::atomic<unsigned long>;
Cell* cells = nullptr;
uint32_t used_cells;
bool wakes_up;                                // a rank that sleeps may be woken in vain
bool waits_end;                               // a rank that sleeps may wake up without a reason
rl::waitset<kMostRanks>* sleeping = nullptr;  // by cell

// Memory that ranks share, but atomics: which parts were read and written, for races.
struct Region {
  const char* from;
  size_t bytes;
  rl::var_data* data;
};
char* block = nullptr;
size_t block_bytes = 0;
std::vector<Region> regions;

// Relacy takes the place of new and delete, too; this gives them back.
struct Memory : rl::context {
  static void is_ordinary() { rl::ctx().*(&Memory::disable_alloc_) = 1 << 20; }
};

Cell& cell(uint32_t* id) {
  if (*id == 0) *id = ++used_cells;
  RL_VERIFY(*id < kCells);
  return cells[*id];
}

rl::memory_order order_of(const Site& site) {
  sites[{site.line, site.op}] = site.order;
  const bool here = weakened.line == site.line && weakened.op == site.op;
  switch (here ? weakened.order : site.order) {
    case std::memory_order_relaxed:
      return rl::mo_relaxed;
    case std::memory_order_acquire:
      return rl::mo_acquire;
    case std::memory_order_release:
      return rl::mo_release;
    case std::memory_order_acq_rel:
      return rl::mo_acq_rel;
    default:
      return rl::mo_seq_cst;
  }
}

rl::debug_info info(unsigned line) { return {"", "core/cpu/host_counters.cc", line}; }

void touch(const void* memory, size_t bytes, bool writes) {
  const char* const from = static_cast<const char*>(memory);
  if (bytes == 0 || from < block || from >= block + block_bytes) return;
  rl::context& context = rl::ctx();
  bool known = false;
  const auto access = [&](rl::var_data* data) {
    const bool ok = writes ? data->store(*context.threadx_) : data->load(*context.threadx_);
    if (!ok) context.fail_test("data race", rl::test_result_data_race, info(0));
  };
  for (const Region& region : regions) {
    if (region.from >= from + bytes || from >= region.from + region.bytes) continue;
    access(region.data);
    known |= region.from == from && region.bytes == bytes;
  }
  if (known) return;
  regions.push_back({from, bytes, context.var_ctor()});
  access(regions.back().data);
}

void reduce(DType dtype, Reduction reduction, const Factors& factors, const void* const* sources,
            int count, int64_t elements, void* out) {
  const size_t bytes = elements * size_of(dtype);
  for (int i = 0; i < count; ++i) touch(sources[i], bytes, false);
  touch(out, bytes, true);
  baseline_loops().reduce(dtype, reduction, factors, sources, count, elements, out);
}

}  // namespace

// --- what the core calls -----------------------------------------------------------------------

namespace model {

uint64_t load(uint32_t* id, const Site& site) {
  return cell(id).load(order_of(site), info(site.line));
}
void store(uint32_t* id, uint64_t value, const Site& site) {
  cell(id).store(value, order_of(site), info(site.line));
}
uint64_t exchange(uint32_t* id, uint64_t value, const Site& site) {
  return cell(id).exchange(value, order_of(site), info(site.line));
}
uint64_t add(uint32_t* id, uint64_t value, const Site& site) {
  return cell(id).fetch_add(value, order_of(site), info(site.line));
}
bool compare_exchange(uint32_t* id, uint64_t* expected, uint64_t value, const Site& site) {
  return cell(id).compare_exchange_strong(*expected, value, order_of(site), info(site.line));
}

// As in the kernel: sees the last store, and nothing comes between that and the sleep.
void wait(uint32_t* id, uint64_t value) {
  unsigned long found = value;
  if (!cell(id).compare_exchange_strong(found, value, rl::mo_relaxed, info(__LINE__))) return;
  sleeping[*id].park_current(rl::ctx(), waits_end, wakes_up, false, info(__LINE__));
}
void wake(uint32_t* id) { sleeping[*id].unpark_one(rl::ctx(), info(__LINE__)); }

}  // namespace model

const Loops& loops() {
  static const Loops all = [] {
    Loops loops = baseline_loops();
    loops.reduce = reduce;
    return loops;
  }();
  return all;
}

void send(const void* from, int64_t bytes, void* to) { std::memcpy(to, from, bytes); }

// SharedMemory::commit(): /dev/shm is full, so chunks are small.
extern "C" bool __wrap__ZN3hvd12SharedMemory6commitEv(SharedMemory*) { return false; }

extern "C" void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  if (block) {
    touch(from, bytes, false);
    touch(to, bytes, true);
  }
  return __real_memcpy(to, from, bytes);
}

// Ranks yield before they sleep, which is no news, and while another one writes why it aborts.
extern "C" int sched_yield() {
  if (waits_end) rl::ctx().yield(1, info(__LINE__));
  return 0;
}

namespace {

// --- the programs of the ranks -----------------------------------------------------------------

// In place of MPI, which is not used.
class NoMpi : public Transport {
 public:
  NoMpi(int ranks, int rank) : ranks_(ranks), rank_(rank) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  const std::string& host(int) const override { return host_; }
  std::optional<Summary> agree(const Proposal&, const Request*, const Waiting&) override {
    return {};
  }
  std::vector<std::string> gather(const std::string&, const Waiting&) override { return {}; }
  Status run(Request&, const Waiting&) override { return {}; }
  void abort(const std::string& why) override { throw Aborted(why); }
  void check_aborted() override {}

 private:
  std::vector<int> ranks_;
  const int rank_;
  const std::string host_ = "here";
};

struct Rank {
  HostTransport* transport;
  Waiting waiting = [](double, const Missing&) { return std::string(); };

  // Agrees on a sum of float tensors of so many elements and runs it, or broadcasts them.
  void run(const std::vector<int64_t>& sizes, Kind kind = Kind::allreduce, bool wide = false) {
    const int rank = transport->rank(), ranks = transport->size();
    std::vector<std::vector<float>> in, out;
    Request request;
    request.kind = kind;
    request.root = ranks - 1;
    for (int64_t n : sizes) {
      in.emplace_back(n, static_cast<float>(rank + 1));
      out.emplace_back(n);
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      const DType dtype = wide && i > 0 ? DType::int32 : DType::float32;
      request.inputs.push_back({in[i].data(), dtype, {sizes[i]}});
      request.outputs.push_back(out[i].data());
      if (dtype == DType::int32) {
        const std::vector<int32_t> values(sizes[i], rank + 1);
        __real_memcpy(in[i].data(), values.data(), sizes[i] * sizeof(int32_t));
      }
    }
    Proposal mine;
    mine.fingerprint = 7 + sizes[0];
    auto all = transport->agree(mine, &request, {});
    if (!all) all = transport->agree(mine, &request, waiting);
    RL_ASSERT(all->all_propose(mine.fingerprint));
    transport->run(request, waiting);
    const int sum = kind == Kind::broadcast ? ranks : ranks * (ranks + 1) / 2;
    for (size_t i = 0; i < out.size(); ++i) {
      if (request.inputs[i].dtype == DType::int32) {
        RL_ASSERT(*reinterpret_cast<int32_t*>(&out[i][0]) == sum);
      } else {
        RL_ASSERT(out[i] == std::vector<float>(sizes[i], static_cast<float>(sum)));
      }
    }
  }
};

constexpr int64_t kChunk = (8 << 10) / sizeof(float);

// Large sums in three chunks; the second one uses slots again.
struct Chunks {
  static constexpr const char* name = "two sums of three chunks";
  static void run(Rank& rank) {
    rank.run({3 * kChunk});
    rank.run({3 * kChunk});
  }
};

// Sums that travel with the proposals; slots are used again from the third on.
struct Along {
  static constexpr const char* name = "four sums that travel with proposals";
  static void run(Rank& rank) {
    for (int i = 0; i < 4; ++i) rank.run({i + 1});
  }
};

// Slots that serve barriers, then chunks, without an agreement between.
struct Mixed {
  static constexpr const char* name = "broadcast, sums of two dtypes, a small sum";
  static void run(Rank& rank) {
    rank.run({2 * kChunk}, Kind::broadcast);
    rank.run({2 * kChunk + 1, 3}, Kind::allreduce, true);
    rank.run({1});
  }
};

// All ranks but the last give up, and all get the reason of the same one.
struct Aborts {
  static constexpr const char* name = "aborts";
  static void run(Rank& rank) {
    const int own = rank.transport->rank();
    try {
      if (own + 1 < rank.transport->size()) rank.transport->abort("by rank " + std::to_string(own));
      rank.run({1});
    } catch (const Aborted& aborted) {
      reasons[own] = aborted.what();
    }
  }
};

// --- the search --------------------------------------------------------------------------------

std::vector<std::unique_ptr<HostTransport>> transports;

template <typename Program, int kRanks>
struct Suite : rl::test_suite<Suite<Program, kRanks>, kRanks> {
  Cell own_cells[kCells];
  rl::waitset<kMostRanks> own_sleeping[kCells];

  void before() {
    Memory::is_ordinary();
    cells = own_cells;
    sleeping = own_sleeping;
    used_cells = 0;
    waits_end = std::is_same_v<Program, Aborts>;
    for (Cell& cell : own_cells) cell.store(0, rl::mo_relaxed, info(0));
    block = nullptr;
    static char* const memory =
        static_cast<char*>(std::aligned_alloc(4096, HostTransport::memory_bytes(kRanks)));
    std::memset(memory, 0, HostCounters::bytes(kRanks));
    transports.clear();
    for (int r = 0; r < kRanks; ++r)
      transports.push_back(
          std::make_unique<HostTransport>(memory, std::make_unique<NoMpi>(kRanks, r)));
    regions.clear();
    reasons = {};
    block_bytes = HostTransport::memory_bytes(kRanks);
    block = memory;
  }

  void thread(unsigned r) {
    Rank rank{transports[r].get()};
    Program::run(rank);
  }

  void after() {
    block = nullptr;
    for (int r = 0; r < kRanks; ++r) {
      RL_ASSERT(reasons[r] == reasons[0]);
      RL_ASSERT(!waits_end || reasons[r].find("by rank ") == 0);
    }
    for (const Region& region : regions) rl::ctx().var_dtor(region.data);
    regions.clear();
  }
};

// All executions on two ranks with so many preemptions, or random ones.
struct Search {
  unsigned preemptions;
  unsigned random;
  bool groups = false;  // the last rank is in another one
};

// What was found, or "".
template <typename Program, int kRanks>
std::string explore(const Search& search, bool reports) {
  std::ostringstream details;
  rl::test_params params;
  params.output_stream = params.progress_stream = &details;
  params.search_type = search.random ? rl::sched_random : rl::sched_bound;
  params.context_bound = search.preemptions;
  params.iteration_count = search.random;
  wakes_up = search.random;  // or there are too many executions
  kRanksPerGroup = kRanks - search.groups;
  params.execution_depth_limit = 20000;
  const bool ok = rl::simulate<Suite<Program, kRanks>>(params);
  block = nullptr;
  if (reports) {
    const std::string which =
        search.random ? "random ones"
                      : "all with at most " + std::to_string(search.preemptions) + " preemptions";
    std::printf("%s %s, %d ranks%s: %llu executions, %s\n%s", ok ? "ok    " : "FAILED",
                Program::name, kRanks, search.groups ? " in two groups" : "",
                static_cast<unsigned long long>(params.stop_iteration), which.c_str(),
                ok ? "" : details.str().c_str());
    std::fflush(stdout);
  }
  return ok ? "" : rl::test_result_str(params.test_result);
}

// The first that is found in any program.
std::string explore_all(Search search, bool reports) {
  const auto both = [&](auto program) {
    std::string found;
    for (bool groups : {false, true}) {
      search.groups = groups;
      if (found.empty()) found = explore<decltype(program), 2>(search, reports);
      if (found.empty() && search.random) found = explore<decltype(program), 3>(search, reports);
    }
    return found;
  };
  std::string found = both(Along());
  if (found.empty()) found = both(Aborts());
  if (found.empty()) found = both(Chunks());
  if (found.empty()) found = both(Mixed());
  return found;
}

const char* text(std::memory_order order) {
  constexpr const char* kTexts[] = {"relaxed", "consume", "acquire",
                                    "release", "acq_rel", "seq_cst"};
  return kTexts[static_cast<int>(order)];
}

// The orders of an operation that are weaker by one step.
std::vector<std::memory_order> weaker(const Site& site) {
  switch (site.order) {
    case std::memory_order_seq_cst:
      if (site.op == Op::load) return {std::memory_order_acquire};
      if (site.op == Op::store) return {std::memory_order_release};
      return {std::memory_order_acq_rel};
    case std::memory_order_acq_rel:
      return {std::memory_order_acquire, std::memory_order_release};
    case std::memory_order_relaxed:
      return {};
    default:
      return {std::memory_order_relaxed};
  }
}

// Weakens one order after another; false if one goes unnoticed.
bool all_orders_are_needed(const Search& search) {
  const auto strong = sites;
  bool all = true;
  for (const auto& [place, order] : strong) {
    for (const std::memory_order less : weaker({place.first, place.second, order})) {
      weakened = {place.first, place.second, less};
      const std::string found = explore_all(search, false);
      std::printf("%s host_counters.cc:%d with %s in place of %s: %s\n",
                  found.empty() ? "FAILED" : "ok    ", place.first, text(less), text(order),
                  found.empty() ? "not noticed" : found.c_str());
      std::fflush(stdout);
      all &= !found.empty();
    }
  }
  return all;
}

}  // namespace
}  // namespace hvd

// prove_test [preemptions]: 0 for random executions alone.
int main(int count, char** arguments) {
  using namespace hvd;
  set_log(LogLevel::error, 0);
  const Search random{0, 20000};
  const unsigned preemptions = count > 1 ? std::stoul(arguments[1]) : 1;
  bool ok = explore_all(random, true).empty() && all_orders_are_needed(random);
  weakened.line = 0;
  if (ok && preemptions > 0) ok = explore_all({preemptions, 0}, true).empty();
  return ok ? 0 : 1;
}
