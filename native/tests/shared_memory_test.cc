// The memory that ranks of one host share, and the barrier in it; on any number of ranks.
#include "core/cpu/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <regex>
#include <thread>

#include "core/base/cores.h"
#include "tests/support/test_call.h"

namespace {
bool has_many_cores = false;
}  // namespace

// In place of glibc's: perhaps core 5000 is one of this process's.
extern "C" int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t* mask) noexcept {
  CPU_ZERO_S(bytes, mask);
  if (has_many_cores && bytes < 1000) {
    errno = EINVAL;
    return -1;
  }
  if (syscall(SYS_sched_getaffinity, process, bytes, mask) < 0) return -1;
  if (has_many_cores) CPU_SET_S(5000, bytes, mask);
  return 0;
}

namespace hvd {
namespace {

using test::rank;
using test::size;

constexpr int64_t kSlotBytes = 1 << 20;
constexpr SharedMemory::Area kArea = {kSlotBytes, 4096};

// The least time between two looks of a rank that sleeps, unless it is woken.
constexpr double kLookSeconds = 0.01;

std::vector<int> all_ranks() {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

SharedMemory new_memory() { return {MPI_COMM_WORLD, all_ranks(), {kArea, kArea, kArea, kArea}}; }

std::string no_deadline(double, const Missing&) { return ""; }

// Of the blocks that this process has mapped.
std::vector<std::string> names_of_blocks() {
  std::vector<std::string> names;
  std::ifstream maps("/proc/self/maps");
  const std::regex name("/dev/shm/(hvd_keras-\\S*)");
  std::smatch found;
  for (std::string line; std::getline(maps, line);) {
    if (std::regex_search(line, found, name)) names.push_back(found[1]);
  }
  return names;
}

// Bytes of /dev/shm that a block takes.
int64_t committed() {
  for (int file = 3; file < 1000; ++file) {
    char path[256];
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    const ssize_t length = readlink(link.c_str(), path, sizeof path);
    if (length < 0 || std::string(path, length).find("/dev/shm/hvd_keras-") != 0) continue;
    struct stat facts;
    return fstat(file, &facts) == 0 ? facts.st_blocks * 512 : -1;
  }
  return -1;
}

// Another job, in a container that shares this host's memory but numbers its own processes, may
// have blocks of any name that is made of a process's number.
TEST(a_block_is_nobody_elses) {
  std::vector<std::string> others;
  for (int i = 0; rank == 0 && i < 100; ++i) {
    others.push_back("/hvd_keras-" + std::to_string(getpid()) + "-" + std::to_string(i));
    close(shm_open(others.back().c_str(), O_RDWR | O_CREAT, 0600));
  }
  {
    const SharedMemory first = new_memory();
    const SharedMemory second = new_memory();
    const std::vector<std::string> names = names_of_blocks();
    CHECK_EQ(names.size(), size_t{2});
    for (const std::string& name : names)
      CHECK(std::regex_match(name, std::regex("hvd_keras-[0-9a-f]{32}")));
    if (names.size() == 2) CHECK(names[0] != names[1]);
    for (const std::string& name : names) CHECK(access(("/dev/shm/" + name).c_str(), F_OK) != 0);
  }
  for (const std::string& other : others) CHECK_EQ(shm_unlink(other.c_str()), 0);
}

// Ranks come one after another. Who waits sleeps until the last one has come, but for its looks.
TEST(nobody_is_woken_before_all_have_come) {
  SharedMemory memory = new_memory();
  int early = 0;
  for (int round = 0; round < 50; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(rank));
    double last = 0;
    memory.barrier([&](double seconds, const Missing& missing) {
      early += seconds - last < kLookSeconds;
      last = seconds;
      // Nobody is missing any more if the last one has come since this look began.
      for (const int late : missing()) CHECK(late != rank);
      return std::string();
    });
  }
  // A rank that the scheduler stopped while it woke others may wake one in the next round.
  CHECK(early <= 1);
}

TEST(a_barrier_holds_all) {
  SharedMemory memory = new_memory();
  for (int64_t round = 1; round <= 2000; ++round) {
    if (round % 500 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Areas in turn: what is written before a barrier stays until after the next.
    *reinterpret_cast<int64_t*>(memory.area(rank, round % 2)) = round * (rank + 1);
    memory.barrier(no_deadline);
    for (int r = 0; r < size; ++r)
      CHECK_EQ(*reinterpret_cast<int64_t*>(memory.area(r, round % 2)), round * (r + 1));
  }
}

// Binds this process while it lives.
class BoundTo {
 public:
  explicit BoundTo(const std::vector<int>& cores) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int core : cores) CPU_SET(core, &mask);
    CHECK_EQ(sched_setaffinity(0, sizeof mask, &mask), 0);
  }
  ~BoundTo() { sched_setaffinity(0, sizeof before_, before_.data()); }

 private:
  const Cores before_ = affinity();
};

// mpirun and srun bind each rank to its own core, which is one for each, and not one for all.
TEST(ranks_know_how_many_share_a_core) {
  std::vector<int> cores;
  const Cores mask = affinity();
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, mask.data())) cores.push_back(core);
  }
  int here = static_cast<int>(cores.size());
  {
    const BoundTo bound({cores[rank % cores.size()]});
    CHECK_EQ(new_memory().counters().ranks_per_core(), (size + here - 1) / here);
  }
  cpu_quota = 2.5;
  here = std::min(here, 2);
  CHECK_EQ(new_memory().counters().ranks_per_core(), (size + here - 1) / here);
  {
    const BoundTo bound({cores[0]});
    CHECK_EQ(new_memory().counters().ranks_per_core(), size);
  }
  // The ranks of the whole job share a core with that of a set of one.
  CHECK_EQ(SharedMemory(MPI_COMM_SELF, {rank}, {kArea}).counters().ranks_per_core(), size);
}

// Where the kernel has more than 1,024, it refuses a smaller mask.
TEST(many_cores_are_counted) {
  const int before = count(affinity());
  has_many_cores = true;
  CHECK_EQ(count(affinity()), before + 1);
  has_many_cores = false;
}

TEST(little_is_committed_until_it_is_asked_for) {
  SharedMemory memory = new_memory();
  CHECK(committed() > 0);
  CHECK(committed() < kSlotBytes);
  memory.barrier(no_deadline);
  CHECK(memory.commit());
  memory.barrier(no_deadline);
  CHECK(committed() >= size * 4 * kSlotBytes);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
