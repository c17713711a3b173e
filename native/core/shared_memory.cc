#include "core/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

namespace hvd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr size_t kReasonBytes = 4000;

// As long as it takes a rank on another core to do a little work of its own.
constexpr double kSpinSeconds = 50e-6;

// How often a sleeping rank looks whether it shall give up.
constexpr int64_t kLookNanoseconds = 10'000'000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// One per rank, on a cache line of its own.
struct alignas(64) SharedMemory::Seat {
  std::atomic<uint64_t> arrived{0};
};

struct SharedMemory::Header {
  std::atomic<uint32_t> bell{0};  // rung for those who sleep
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> lost{0};  // 1: somebody writes the reason, 2: it is there
  char reason[kReasonBytes];
};

SharedMemory::SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks, int64_t bytes)
    : ranks_(ranks), part_bytes_(whole_pages(bytes)) {
  MPI_Comm_rank(communicator, &rank_);
  const int size = static_cast<int>(ranks_.size());
  spin_seconds_ = size <= cores() ? kSpinSeconds : 0;
  const int64_t seats = static_cast<int64_t>(sizeof(Seat)) * size;
  const int64_t front = whole_pages(whole_pages(sizeof(Header)) + seats);
  block_bytes_ = front + part_bytes_ * size;

  // The first rank makes it, the others open it by its name, and then the name goes.
  char name[64] = "";
  int file = -1;
  std::string why;
  if (rank_ == 0) {
    static std::atomic<int> number{0};
    std::snprintf(name, sizeof name, "/hvd_keras-%ld-%d", static_cast<long>(getpid()), number++);
    shm_unlink(name);  // of a process that had this number before
    file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    // Reserved now: a full /dev/shm would otherwise kill a rank when it writes.
    const int error = file < 0 ? errno : posix_fallocate(file, 0, block_bytes_);
    if (error != 0) why = std::strerror(error);
  }
  MPI_Bcast(name, sizeof name, MPI_CHAR, 0, communicator);
  if (rank_ != 0) {
    file = shm_open(name, O_RDWR, 0);
    if (file < 0) why = std::strerror(errno);
  }
  if (why.empty()) {
    void* mapped = mmap(nullptr, block_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
      why = std::strerror(errno);
    } else {
      block_ = static_cast<char*>(mapped);
    }
  }
  if (file >= 0) close(file);
  int failed = why.empty() ? 0 : 1;
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, communicator);
  if (rank_ == 0) shm_unlink(name);
  if (failed) {
    if (block_) munmap(block_, block_bytes_);
    throw std::runtime_error(why.empty() ? "another rank could not" : why);
  }
  header_ = reinterpret_cast<Header*>(block_);
  if (rank_ == 0) new (header_) Header;
  new (&seat(rank_)) Seat;
  MPI_Barrier(communicator);
}

SharedMemory::~SharedMemory() { munmap(block_, block_bytes_); }

SharedMemory::Seat& SharedMemory::seat(int rank) const {
  return reinterpret_cast<Seat*>(block_ + whole_pages(sizeof(Header)))[rank];
}

char* SharedMemory::part(int rank) const {
  return block_ + block_bytes_ - part_bytes_ * (static_cast<int64_t>(ranks_.size()) - rank);
}

bool SharedMemory::all_are_here() const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (seat(static_cast<int>(r)).arrived.load(std::memory_order_seq_cst) < step_) return false;
  }
  return true;
}

void SharedMemory::meet(const Waiting& waiting) {
  // Both in one total order with the sleeper's two steps, or a wake-up could be lost.
  seat(rank_).arrived.store(++step_, std::memory_order_seq_cst);
  if (header_->sleepers.load(std::memory_order_seq_cst) > 0) {
    header_->bell.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &header_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  if (all_are_here()) return;
  if (spin_seconds_ > 0) {
    const auto start = Clock::now();
    do {
      for (int i = 0; i < 50; ++i) {
        if (all_are_here()) return;
        pause();
      }
    } while (seconds_since(start) < spin_seconds_);
  }
  sleep(waiting);
}

void SharedMemory::listen() const {
  if (header_->lost.load(std::memory_order_acquire) == 2) throw Lost(header_->reason);
}

void SharedMemory::sleep(const Waiting& waiting) {
  const auto start = Clock::now();
  while (true) {
    header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t bell = header_->bell.load(std::memory_order_seq_cst);
    const bool here = all_are_here();
    if (!here) {
      const timespec limit = {0, kLookNanoseconds};
      syscall(SYS_futex, &header_->bell, FUTEX_WAIT, bell, &limit, nullptr, 0);
    }
    header_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (here || all_are_here()) return;
    listen();
    std::vector<int> missing;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (seat(static_cast<int>(r)).arrived.load(std::memory_order_acquire) < step_)
        missing.push_back(ranks_[r]);
    }
    const std::string why = waiting(seconds_since(start), missing);
    if (!why.empty()) give_up(why);
  }
}

void SharedMemory::give_up(const std::string& why) {
  uint32_t nobody = 0;
  if (header_->lost.compare_exchange_strong(nobody, 1)) {
    const size_t n = std::min(why.size(), kReasonBytes - 1);
    std::memcpy(header_->reason, why.data(), n);
    header_->reason[n] = '\0';
    header_->lost.store(2, std::memory_order_release);
    header_->bell.fetch_add(1);
    syscall(SYS_futex, &header_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    throw Lost(why);
  }
  while (header_->lost.load(std::memory_order_acquire) != 2) sched_yield();
  throw Lost(header_->reason);
}

}  // namespace hvd
