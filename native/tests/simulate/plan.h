// What one seed does: a job's hosts and ranks, what each rank submits, and what goes wrong.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/settings.h"
#include "core/request/collectives.h"
#include "tests/simulate/network.h"

namespace hvd::sim {

struct Item {
  Kind kind = Kind::allreduce;
  std::string name;
  int occurrence = 0;  // of this kind and name in this rank's program
  int set = 0;
  DType dtype = DType::float32;
  Reduction reduction = Reduction::sum;
  int root = 0;
  int64_t rows = 1;
  uint64_t key = 0;  // of its values
  // On this rank alone:
  bool odd = false;           // of another shape
  std::string problem;        // cannot run
  bool lacks_memory = false;  // the output cannot be allocated
  bool throws = false;        // instead

  std::string text() const {
    return std::string(collective(kind).name) + " " + name + "#" + std::to_string(occurrence);
  }
};

struct Fault {
  enum { kill, pause, cut } what;
  int rank, other;  // cut: hosts
  Nanoseconds time, length;
  bool noticed;
};

struct Plan {
  explicit Plan(uint64_t seed) : random(seed ^ 0x5eed) {
    const int hosts = 1 + static_cast<int>(random.upto(3));
    for (int h = 0; h < hosts; ++h)
      for (int n = static_cast<int>(random.upto(hosts > 2 ? 1 : 2)); n >= 0; --n) host.push_back(h);
    if (host.size() == 1) host.push_back(0);
    ranks = static_cast<int>(host.size());
    for (int r = 0; r < ranks; ++r) all.push_back(r);
    if (random.chance(3)) {
      for (int r = 0; r < ranks; ++r)
        if (random.chance(2)) some.push_back(r);
    }
    if (some.size() < 2) some.clear();
    few = random.chance(2) ? 16 : 1;
    settings.allreduce = random.chance(3) ? Allreduce::grid : Allreduce::automatic;
    settings.stall_warning_seconds = random.chance(3) ? 0 : 1.2;
    settings.timeout_seconds = settings.first_timeout_seconds = 6;
    if (random.chance(3)) settings.first_timeout_seconds = 8;
    settings.mismatch_seconds = random.chance(4) ? 0 : 3;
    constexpr int64_t kEager[] = {64, 512, 4096, INT64_MAX};
    conditions.eager_bytes = kEager[random.upto(3)];
    conditions.latency = random.chance(4) ? kMillisecond : 40 * kMicrosecond;
    if (random.chance(3)) conditions.most_late = random.chance(2) ? 20 * kMillisecond : kSecond;
    if (random.chance(2)) conditions.shared_bytes = random.chance(6) ? 0 : 100'000;
    if (random.chance(2)) conditions.poor_host = static_cast<int>(random.upto(hosts - 1));
    write_programs();
    if (random.chance(2)) deviate();
    if (random.chance(2)) choose_fault(hosts);
    leaves_early &= faults.empty();
  }

  Random random;
  std::vector<int> host;  // by rank
  int ranks = 0, few = 16;
  std::vector<int> all, some;  // ranks of the two process sets; the second may have none
  Settings settings;
  Conditions conditions;
  std::vector<std::vector<Item>> programs;  // by rank
  std::vector<bool> waits_each;             // by rank: for each request before the next
  bool catches = true;                      // scripts go on after an error
  std::set<int> stays;  // ranks that neither submit what others wait for nor leave
  std::vector<Fault> faults;
  std::set<int> culprits;  // ranks
  bool joining = false;
  bool leaves_early = false;      // a rank, and nothing else goes wrong
  bool agrees = true;             // all ranks submit the same
  std::set<std::string> refused;  // requests whose error is planned

  const std::vector<int>& members(int set) const { return set == 0 ? all : some; }
  const Item* find(int rank, const Item& item) const {
    for (const Item& own : programs[rank])
      if (own.text() == item.text()) return &own;
    return nullptr;
  }
  bool cuts() const { return !faults.empty() && faults[0].what == Fault::cut; }
  static bool joins(const std::vector<Item>& program) {
    return !program.empty() && program.back().kind == Kind::join;
  }

 private:
  void write_programs() {
    constexpr Kind kKinds[] = {Kind::allreduce, Kind::allreduce,     Kind::allreduce,
                               Kind::reduce,    Kind::allgather,     Kind::broadcast,
                               Kind::alltoall,  Kind::reducescatter, Kind::barrier};
    constexpr int64_t kRows[] = {1, 3, 30, 2000, 12'000};
    std::vector<Item> step;
    for (int64_t n = random.upto(3); n >= 0; --n) {
      Item item;
      item.kind = kKinds[random.upto(8)];
      item.name = std::string(1, static_cast<char>('a' + n));
      item.set = !some.empty() && random.chance(3);
      item.rows = kRows[random.upto(random.chance(6) ? 4 : 3)];
      if (random.chance(30)) item.rows = random.chance(10) ? 100'000 : 20'000;  // whole chunks
      item.dtype = random.chance(3) ? DType::int32 : DType::float32;
      if (random.chance(3)) item.reduction = Reduction::max;
      if (item.dtype == DType::float32 && random.chance(2)) item.reduction = Reduction::average;
      item.root =
          members(item.set)[random.upto(static_cast<int64_t>(members(item.set).size()) - 1)];
      step.push_back(item);
    }
    joining = random.chance(5);  // of the set of all ranks alone
    if (joining)
      for (Item& item : step) item.set = 0;
    std::vector<Item> whole;
    for (int64_t steps = random.upto(random.chance(4) ? 6 : 2); steps >= 0; --steps)
      whole.insert(whole.end(), step.begin(), step.end());
    for (int r = 0; r < ranks; ++r) {
      std::vector<Item>& program = programs.emplace_back();
      for (const Item& item : whole) {
        const auto& with = members(item.set);
        if (std::count(with.begin(), with.end(), r)) program.push_back(item);
      }
      waits_each.push_back(random.chance(2));
      if (!waits_each[r] && random.chance(3)) shuffle(program);
      if (!joining) continue;
      if (random.chance(2)) {
        const int64_t n = random.upto(static_cast<int64_t>(program.size()));
        program.resize(n);
        agrees = false;
      }
      Item join;
      join.kind = Kind::join;
      program.push_back(join);
    }
    number();
  }

  void number() {
    for (auto& program : programs) {
      std::map<std::string, int> seen;
      for (Item& item : program) {
        item.occurrence = 0;
        item.occurrence = seen[item.text()]++;
        Hash hash;
        hash.add(item.text());
        item.key = hash.value();
      }
    }
  }

  void shuffle(std::vector<Item>& program) {
    for (size_t i = program.size() - joins(program); i > 1; --i)
      std::swap(program[i - 1], program[random.upto(static_cast<int64_t>(i) - 1)]);
  }

  void deviate() {
    const int rank = static_cast<int>(random.upto(ranks - 1));
    std::vector<Item>& program = programs[rank];
    if (program.empty()) return;
    Item& item = program[random.upto(static_cast<int64_t>(program.size()) - 1)];
    catches = random.chance(2);
    const int64_t what = random.upto(5);
    if (what <= 2) {
      if (item.kind == Kind::join || item.kind == Kind::barrier) return;
      if (what == 2 && collective(item.kind).keeps_shape) return;
      refused.insert(item.text());
      if (what == 0) item.odd = true;
      if (what == 1) item.problem = "rank " + std::to_string(rank) + " cannot";
      if (what == 2) (random.chance(4) ? item.throws : item.lacks_memory) = true;
      if (item.throws) culprits.insert(rank);
    } else if (what == 3) {
      shuffle(program);  // although it may wait for each
      number();
      agrees = false;
      if (!some.empty()) culprits.insert(all.begin(), all.end());  // two sets wait for each other
    } else {
      program.resize(&item - program.data());
      culprits.insert(rank);
      if (what == 4) stays.insert(rank);
      leaves_early = what > 4 && some.empty() && !joining;
      agrees = false;
    }
  }

  void choose_fault(int hosts) {
    Fault fault{};
    fault.rank = static_cast<int>(random.upto(ranks - 1));
    fault.time =
        random.upto(random.chance(2) ? 50 : 5) * kMillisecond + random.upto(1000) * kMicrosecond;
    const int64_t what = random.upto(3);
    if (what == 0) {
      fault.what = Fault::kill;
      culprits.insert(fault.rank);
    } else if (what == 1 && hosts > 1) {
      fault.what = Fault::cut;
      fault.rank = static_cast<int>(random.upto(hosts - 1));
      fault.other = static_cast<int>((fault.rank + 1 + random.upto(hosts - 2)) % hosts);
      fault.noticed = random.chance(2);
      for (int r = 0; r < ranks; ++r)
        if (host[r] == fault.rank || host[r] == fault.other) culprits.insert(r);
    } else {
      fault.what = Fault::pause;
      fault.length = random.chance(2)   ? random.upto(800) * kMillisecond
                     : random.chance(2) ? kNever
                                        : (8 + random.upto(10)) * kSecond;
      if (fault.length > kSecond) culprits.insert(fault.rank);
    }
    faults.push_back(fault);
  }
};

}  // namespace hvd::sim
