// Counts the messages and bytes that each rank sends for one request, and its reads of shared
// counters, and fails if one grows with the number of ranks, beyond what the operation must move.
// What MPI sends itself is computed.
#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/shared_atomic.h"
#include "core/cpu/host_counters.h"
#include "core/cpu/inter_host.h"
#include "core/engine/engine.h"
#include "tests/simulate/network.h"
#include "tests/simulate/transport.h"

namespace hvd::sim {
namespace {

constexpr int kPerHost = 8;
// More ranks do not all talk with all: 10,000 would send a hundred million messages.
constexpr int kMostWithAll = 1024;
// Fewer show no growth.
constexpr int kLeastRanks = 32;
// The most by which a figure may grow when there are four times as many ranks: as the square root.
constexpr double kMostGrowth = 2.1;
// What is less is no growth.
constexpr uint64_t kFew = 64, kFewBytes = 4 << 10;

struct Case {
  const char* name;
  Kind kind;
  int64_t rows;                 // of 4 bytes
  int64_t of_each = 0;          // and so many for each rank
  const char* known = nullptr;  // why it grows, if it does
};

constexpr Case kCases[] = {
    {"barrier", Kind::barrier, 0},
    {"allreduce of 4 B", Kind::allreduce, 1},
    {"allreduce of 64 KiB", Kind::allreduce, 16 << 10},
    {"broadcast of 4 KiB", Kind::broadcast, 1 << 10},
    {"allgather of 4 B", Kind::allgather, 1},
    {"allgather of 64 B", Kind::allgather, 16},
    {"reducescatter", Kind::reducescatter, 0, 4, "each rank sends its part to each other"},
    {"alltoall", Kind::alltoall, 0, 1, "each rank has something for each other"},
    {"waiting for a late rank", Kind::allreduce, 1},
    {"negotiation", Kind::allreduce, 1},
    {"texts of an error", Kind::allreduce, 1},
};

// What a rank must get or send, in bytes. Of small sums it gets the terms of all hosts, in one
// agreement or several: other ways take many more messages. Before an allgather it gets the numbers
// of rows. A host that stands for one beyond a power of two sends all that is gathered to that one,
// too.
uint64_t least_bytes(const Case& of, int ranks) {
  const uint64_t bytes = 4 * (of.rows + of.of_each * ranks);
  const uint64_t terms = bytes * ((ranks - 1) / kPerHost + 1);
  if (of.kind == Kind::allreduce && terms <= kGatheredBytes) return 2 * bytes + 3 * terms;
  return of.kind == Kind::allgather   ? (bytes + 8) * ranks * 3 / 2
         : of.kind == Kind::allreduce ? 2 * bytes
                                      : bytes;
}

// How many messages these bytes take, of small ones that leaders gather in pairs.
uint64_t least_messages(const Case& of, int ranks) {
  uint64_t steps = 0;
  while (kPerHost << steps < ranks) ++steps;
  return of.kind == Kind::allgather ? least_bytes(of, ranks) / kGatheredBytes * steps : 0;
}

bool counts(const Case& of, int ranks) { return !of.known || ranks <= kMostWithAll; }

// What the ranks warn of.
std::vector<std::string> warnings;

// The second half of the ranks differs in these.
bool fails(const Case& of) { return std::string(of.name) == "texts of an error"; }

struct Call {
  std::vector<float> input, output;
  static std::vector<float> gathered;  // alike on all ranks, which share the memory
  std::vector<int64_t> splits, received;
  Fiber* waiter = nullptr;
  bool done = false;
};

std::vector<float> Call::gathered;

void submit(Engine& engine, const Case& of, const std::string& name, Call* call) {
  const int ranks = static_cast<int>(engine.ranks().size());
  const bool second_half = simulation->process().rank >= ranks / 2;
  const int64_t n = of.rows + of.of_each * ranks + (fails(of) && second_half);
  call->input.resize(n);
  std::vector<float>& output = of.kind == Kind::allgather ? Call::gathered : call->output;
  output.resize(of.kind == Kind::allgather ? n * ranks : n);
  Request request;
  request.kind = of.kind;
  request.name = name;
  if (of.kind != Kind::barrier) request.inputs.push_back({call->input.data(), DType::float32, {n}});
  if (collective(of.kind).keeps_shape) request.outputs.push_back(output.data());
  if (of.kind == Kind::alltoall) {
    call->splits.assign(ranks, of.of_each);
    call->received.resize(ranks);
    request.inputs.push_back({call->splits.data(), DType::int64, {ranks}});
  }
  request.allocate = [call, &output](size_t index, const Shape&, void** data) {
    *data = index == 1 ? static_cast<void*>(call->received.data()) : output.data();
    return Status();
  };
  std::string wanted;
  if (fails(of)) {
    const std::string last = std::to_string(ranks / 2 - 1), first = std::to_string(ranks / 2);
    wanted = "ranks 0-" + last + ": op=Sum float32[1]\n  ranks " + first + "-" +
             std::to_string(ranks - 1) + ": op=Sum float32[2]\n";
  }
  request.done = [call, name, wanted](const Status& status) {
    call->done = true;
    if (status.ok() != wanted.empty() || status.message.find(wanted) == std::string::npos)
      simulation->violate(name + ": " + status.message);
    if (call->waiter) simulation->wake(call->waiter);
  };
  engine.submit(std::move(request));
}

void wait(Call* call) {
  call->waiter = simulation->fiber();
  while (!call->done) simulation->block(kNever);
}

// By case, the most of any rank.
std::vector<Traffic> count(int ranks, bool& right) {
  warnings.clear();
  Simulation all(1, false);
  for (int r = 0; r < ranks; ++r) {
    Process& process = all.processes.emplace_back();
    process.rank = r;
    process.host = r / kPerHost;
  }
  new_network({});
  std::vector<Traffic> most(::std::size(kCases));
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  const auto script = [&](int r) {
    Settings settings;
    settings.stall_warning_seconds = 2.5;
    Engine engine(
        new_transport(MPI_COMM_WORLD, members, MpiTransport::kFewRanks, Allreduce::automatic),
        settings);
    for (size_t i = 0; i < most.size(); ++i) {
      const Case& of = kCases[i];
      const std::string name = of.name;
      if (!counts(of, ranks)) continue;
      Call meeting, one, two;
      submit(engine, kCases[0], "meeting", &meeting);
      wait(&meeting);
      const Traffic before = traffic(r);
      if (name.rfind("waiting", 0) == 0 && r == ranks - 1) all.sleep(3 * kSecond);
      if (name == "negotiation") {
        submit(engine, of, r % 2 ? "odd" : "even", &one);
        submit(engine, of, r % 2 ? "even" : "odd", &two);
        wait(&two);
      } else {
        submit(engine, of, name, &one);
      }
      wait(&one);
      most[i].messages = std::max(most[i].messages, traffic(r).messages - before.messages);
      most[i].bytes = std::max(most[i].bytes, traffic(r).bytes - before.bytes);
    }
    engine.announce_leaving("");
    (void)engine.leave(-1);
    engine.close();
  };
  for (int r = 0; r < ranks; ++r) all.start(all.processes[r], [&script, r] { script(r); });
  all.run(1000 * kSecond);
  const std::string late = ", which rank " + std::to_string(ranks - 1) + " (on host" +
                           std::to_string((ranks - 1) / kPerHost) + ") has not submitted";
  const auto names_it = [&](const std::string& text) { return text.find(late) != text.npos; };
  if (static_cast<int>(warnings.size()) != ranks - 1 ||
      !std::all_of(warnings.begin(), warnings.end(), names_it))
    all.violate("not all warn of the late rank alone");
  if (!all.violation.empty()) std::printf("FAILED %d ranks: %s\n", ranks, all.violation.c_str());
  right &= all.violation.empty();
  return most;
}

// The most of any rank, when it increases its counter and looks once at those of all.
uint64_t reads_of_counters(int ranks) {
  kRanksPerGroup = 16;
  std::vector<char> room(HostCounters::bytes(ranks) + 64);
  void* memory = room.data();
  size_t space = room.size();
  memory = std::align(64, space - 64, memory, space);
  uint64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    HostCounters counters(memory, r, std::vector<int>(ranks), 1);
    const uint64_t before = shared_reads;
    counters.advance(HostCounters::arrived, 1);
    (void)counters.least(HostCounters::arrived);
    most = std::max(most, shared_reads - before);
  }
  return most;
}

// Hosts have at most some hundred ranks.
bool count_reads() {
  bool right = true;
  std::printf("\nReads of counters on one host:");
  uint64_t was = 0;
  for (int ranks : {16, 64, 256}) {
    const uint64_t is = reads_of_counters(ranks);
    const bool grows = was && static_cast<double>(is) / was > kMostGrowth;
    std::printf(" %d ranks %llu%s", ranks, static_cast<unsigned long long>(is),
                grows ? " GROWS" : "");
    right &= !grows;
    was = is;
  }
  std::printf("\n");
  return right;
}

}  // namespace

void counted_warning(const std::string& text) { warnings.push_back(text); }

// Returns whether each case grows as expected, up to so many ranks.
bool count_all(int most) {
  std::vector<int> sizes;
  for (int ranks = most; ranks >= kLeastRanks; ranks /= 4) sizes.insert(sizes.begin(), ranks);
  std::map<int, std::vector<Traffic>> by_size;
  bool right = true;
  for (int ranks : sizes) by_size[ranks] = count(ranks, right);
  std::printf("Messages and bytes of one request, the most of any rank:\n%-26s", "ranks");
  for (int ranks : sizes) std::printf("%19d", ranks);
  std::printf("\n");
  for (size_t i = 0; i < ::std::size(kCases); ++i) {
    const Case& of = kCases[i];
    std::printf("%-26s", of.name);
    double growth = 0;
    for (size_t k = 0; k < sizes.size(); ++k) {
      if (!counts(of, sizes[k])) {
        std::printf("%19s", "-");
        continue;
      }
      const Traffic& is = by_size[sizes[k]][i];
      std::printf("%8llu %10llu", static_cast<unsigned long long>(is.messages),
                  static_cast<unsigned long long>(is.bytes));
      if (k == 0) continue;
      const Traffic& was = by_size[sizes[k - 1]][i];
      const auto beyond = [&](const Traffic& traffic, int ranks) {
        const uint64_t least = 2 * least_bytes(of, ranks);  // each once more, say to a leader
        return traffic.bytes > least ? traffic.bytes - least : 0;
      };
      if (is.messages > kFew + least_messages(of, sizes[k]))
        growth = std::max(growth, static_cast<double>(is.messages) / was.messages);
      if (beyond(is, sizes[k]) > kFewBytes)
        growth = std::max(growth, static_cast<double>(beyond(is, sizes[k])) /
                                      std::max<uint64_t>(1, beyond(was, sizes[k - 1])));
    }
    const bool grows = growth > kMostGrowth;
    const char* const says = grows && of.known ? "grows, known: "
                             : grows           ? "GROWS"
                             : of.known        ? "DOES NOT GROW ANY MORE: "
                                               : "";
    std::printf("  %s%s\n", says, of.known ? of.known : "");
    right &= grows == (of.known != nullptr);
  }
  return count_reads() && right;
}

}  // namespace hvd::sim
