// The counters, and the trace, which can be read at every moment.
#include "core/engine/recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "tests/support/check.h"

namespace hvd {
namespace {

using std::chrono::microseconds;

std::string folder;  // of this run's files

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

constexpr uint64_t kMillisecond = 1'000'000;

// Of ranks that have waited so long.
Summary agreement(const std::vector<uint64_t>& waited_ns) {
  Summary agreement;
  for (size_t r = 0; r < waited_ns.size(); ++r)
    agreement.add(Summary({0, 0, waited_ns[r]}, static_cast<int>(r)));
  return agreement;
}

// Waited 50 ms and ran for 1.
Served event(uint64_t bytes = 100) {
  return {7, 1, kMillisecond, 51 * kMillisecond, 52 * kMillisecond, bytes};
}

std::vector<Served> events(const std::string& path) {
  const std::string data = read(path);
  std::vector<Served> all(data.size() / sizeof(Served));
  std::memcpy(all.data(), data.data(), all.size() * sizeof(Served));
  return all;
}

int new_file(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
}

TEST(who_waits_least_came_last) {
  Recorder recorder(0, 3);
  recorder.served("allreduce", "x", event());
  recorder.served("allreduce", "y", event(11));
  for (int i = 0; i < 2; ++i)  // of three ranks, of which the second waited least
    recorder.agreed({0, 1, 2},
                    agreement({50 * kMillisecond, 10 * kMillisecond, 30 * kMillisecond}));
  const std::string stats = recorder.stats();
  CHECK_CONTAINS(stats,
                 "\"allreduce\": {\"requests\": 2, \"bytes\": 111, \"waiting_seconds\": 0.100000, "
                 "\"moving_seconds\": 0.002000}");
  // The others waited 40 and 20 ms longer, on average 30, twice.
  CHECK_CONTAINS(stats,
                 "[{\"last\": 0, \"awaited_seconds\": 0.000000}, {\"last\": 2, "
                 "\"awaited_seconds\": 0.060000}, {\"last\": 0, ");
}

TEST(ranks_that_come_together_are_not_late) {
  Recorder recorder(0, 3);
  recorder.agreed({0, 1, 2}, agreement({1000, 90'000, 50'000}));
  Recorder alone(0, 1);
  alone.agreed({0}, agreement({kMillisecond}));
  CHECK_EQ(count(recorder.stats(), "\"last\": 0"), size_t{3});
  CHECK_EQ(count(alone.stats(), "\"last\": 0"), size_t{1});
}

TEST(every_request_is_in_the_trace_at_once) {
  const std::string path = folder + "/trace";
  Recorder recorder(0, 3);
  recorder.served("allreduce", "before", event());
  recorder.trace(new_file(path));
  for (uint64_t i = 0; i < 300; ++i) {
    recorder.served("allreduce", std::string(i, 'x'), event(i));
    const std::vector<Served> all = events(path);
    if (!CHECK_EQ(all.size(), i + 1)) break;
    CHECK_EQ(all[i].bytes, i);
    CHECK_EQ(all[i].process_set, uint64_t{7});
    const std::string title(all[i].title, strnlen(all[i].title, sizeof all[i].title));
    CHECK_EQ(title, ("allreduce " + std::string(i, 'x')).substr(0, sizeof all[i].title));
  }
  recorder.trace(-1);
  recorder.served("allreduce", "later", event());
  CHECK_EQ(events(path).size(), size_t{300});
}

TEST(a_full_disk_ends_the_trace_only) {
  const std::string path = folder + "/full";
  const rlimit small{100'000, 100'000};
  if (fork() == 0) {
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    Recorder recorder(0, 3);
    recorder.trace(new_file(path));
    (void)!std::freopen("/dev/null", "w", stderr);
    for (int i = 0; i < 1000; ++i) recorder.served("allreduce", "x", event());
    _exit(count(recorder.stats(), "\"requests\": 1000") == 1 ? 0 : 1);
  }
  int status = -1;
  wait(&status);
  CHECK_EQ(status, 0);
  CHECK_EQ(events(path).size(), 100'000 / sizeof(Served));
}

TEST(whatever_kills_the_process) {
  std::mt19937 random(1);
  size_t shortest = SIZE_MAX, longest = 0;
  for (int i = 0; i < 200; ++i) {
    const std::string path = folder + "/killed";
    unlink(path.c_str());
    const pid_t child = fork();
    if (child == 0) {
      Recorder recorder(0, 3);
      recorder.trace(new_file(path));
      while (true) recorder.served("allreduce", "x", event());
    }
    while (access(path.c_str(), F_OK) != 0) std::this_thread::yield();
    std::this_thread::sleep_for(microseconds(random() % 10'000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::vector<Served> all = events(path);
    for (const Served& one : all) CHECK_EQ(one.end_ns, event().end_ns);
    shortest = std::min(shortest, all.size());
    longest = std::max(longest, all.size());
  }
  CHECK(longest > shortest);  // some were killed after the file had grown
}

}  // namespace
}  // namespace hvd

int main() {
  char name[] = "/tmp/hvd-recorder-XXXXXX";
  hvd::folder = mkdtemp(name);
  const int status = hvd::test::run();
  for (const char* file : {"trace", "full", "killed"}) unlink((hvd::folder + "/" + file).c_str());
  rmdir(hvd::folder.c_str());
  return status;
}
