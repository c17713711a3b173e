// simulate_test FIRST COUNT [JOBS]: runs so many seeds, each twice.
// simulate_test SEED: shows what happens.
// simulate_test count [RANKS]: counts messages (count.cc).
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tests/simulate/job.h"

namespace hvd::sim {

Job* Job::current = nullptr;

// In count.cc.
bool count_all(int most);
void counted_warning(const std::string& text);

void logged(const std::string& text) {
  if (Job::current)
    Job::current->logged(text);
  else
    counted_warning(text);
}

namespace {

// Seeds of one process: what a job that hangs leaves in memory goes with it.
constexpr uint64_t kAtOnce = 200;
// Of real time, for one of these.
constexpr unsigned kSeconds = 300;

struct Found {
  uint64_t seed, events, failures;
  uint64_t counts[16];
};

const std::vector<std::string> kCounts = {"run",
                                          "failed with 3",
                                          "failed with 4",
                                          "failed with 9",
                                          "failed with 10",
                                          "names culprits",
                                          "names others, too",
                                          "names nobody"};

std::string run(uint64_t seed, bool shows, Found* found) {
  uint64_t hashes[2];
  std::string violation;
  for (int again : {0, 1}) {
    Job job(seed, shows && !again);
    Job::current = &job;
    violation = job.run();
    hashes[again] = job.hash();
    if (!found || again) continue;
    found->events += job.events();
    for (size_t i = 0; i < kCounts.size(); ++i) found->counts[i] += job.counts[kCounts[i]];
  }
  if (hashes[0] != hashes[1]) return "two runs differ";
  return violation;
}

int run_all(const char* program, uint64_t first, uint64_t count, int jobs) {
  Found* const found = static_cast<Found*>(::mmap(
      nullptr, sizeof(Found) * jobs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::map<pid_t, int> running;
  uint64_t next = first, failed = 0;
  while (next < first + count || !running.empty()) {
    if (next < first + count && static_cast<int>(running.size()) < jobs) {
      int place = 0;
      for (const auto& other : running) place += other.second == place;
      for (int p = 0; p < jobs; ++p) {
        bool used = false;
        for (const auto& other : running) used |= other.second == p;
        if (!used) place = p;
      }
      const uint64_t end = std::min(next + kAtOnce, first + count);
      std::fflush(stdout);
      const pid_t child = fork();
      if (child == 0) {
        alarm(kSeconds);
        uint64_t failures = 0;
        for (uint64_t seed = next; seed < end; ++seed) {
          found[place].seed = seed;
          const std::string violation = run(seed, false, &found[place]);
          if (violation.empty()) continue;
          ++failures;
          std::printf("FAILED seed %llu: %s\n       repeat: %s %llu\n",
                      static_cast<unsigned long long>(seed), violation.c_str(), program,
                      static_cast<unsigned long long>(seed));
          std::fflush(stdout);
        }
        found[place].failures += failures;
        std::_Exit(0);
      }
      running[child] = place;
      next = end;
      continue;
    }
    int status = 0;
    const pid_t child = wait(&status);
    const int place = running[child];
    running.erase(child);
    if (status == 0) continue;
    ++failed;
    std::printf("FAILED seed %llu: %s\n       repeat: %s %llu\n",
                static_cast<unsigned long long>(found[place].seed),
                WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "does not end" : "crashes",
                program, static_cast<unsigned long long>(found[place].seed));
  }
  Found all{};
  for (int place = 0; place < jobs; ++place) {
    failed += found[place].failures;
    all.events += found[place].events;
    for (size_t i = 0; i < kCounts.size(); ++i) all.counts[i] += found[place].counts[i];
  }
  std::printf("%llu seeds, %llu failed; %llu steps", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(failed), static_cast<unsigned long long>(all.events));
  for (size_t i = 0; i < kCounts.size(); ++i)
    std::printf("; %s: %llu", kCounts[i].c_str(), static_cast<unsigned long long>(all.counts[i]));
  std::printf("\n");
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace hvd::sim

int main(int argc, char** argv) {
  const auto number = [&](int i, uint64_t otherwise) {
    return i < argc ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  if (argc > 1 && std::string(argv[1]) == "count")
    return hvd::sim::count_all(static_cast<int>(number(2, 10000))) ? 0 : 1;
  if (argc < 3) {
    const std::string violation = hvd::sim::run(number(1, 0), true, nullptr);
    std::printf("%s\n", violation.empty() ? "ok" : violation.c_str());
    return violation.empty() ? 0 : 1;
  }
  return hvd::sim::run_all(argv[0], number(1, 0), number(2, 1), static_cast<int>(number(3, 1)));
}
