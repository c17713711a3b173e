#include "core/cpu/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
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

#include "core/base/cores.h"

namespace hvd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr size_t kReasonBytes = 4000;

// Long enough for ranks on other cores that arrive slightly later; a wake-up by the kernel costs as
// much.
constexpr double kSpinSeconds = 50e-6;

// How often a sleeping rank checks whether to abort.
constexpr int64_t kAbortCheckNanoseconds = 10'000'000;

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

// The number of cores that the ranks may use together: each may be bound to other cores.
int cores(MPI_Comm communicator) {
  cpu_set_t mask = affinity();
  double quota = cpu_quota();
  MPI_Allreduce(MPI_IN_PLACE, &mask, sizeof mask, MPI_BYTE, MPI_BOR, communicator);
  MPI_Allreduce(MPI_IN_PLACE, &quota, 1, MPI_DOUBLE, MPI_MIN, communicator);
  return static_cast<int>(std::min<double>(CPU_COUNT(&mask), quota));
}

// A random name. Not one made of the process id: jobs in containers that share /dev/shm may have
// the same ids. Empty, with errno set, if there is no randomness.
std::string new_name() {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) return "";
  std::string name = "/hvd_keras-";
  for (const unsigned char byte : random) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    name += digits;
  }
  return name;
}

int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::string no_room_text(int64_t chunk_bytes) {
  return "/dev/shm is full on a host, so tensors travel in pieces of " +
         std::to_string(chunk_bytes) +
         " bytes, which is slower. Make it larger; containers need --shm-size or --ipc=host.";
}

// One per rank, each on its own cache line.
struct alignas(64) SharedMemory::ArrivalCounter {
  std::atomic<uint64_t> arrived{0};
};

struct SharedMemory::Header {
  std::atomic<uint32_t> wakeups{0};  // a futex: counts up to wake sleeping ranks
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> aborted{0};  // 1: a rank writes the reason, 2: written
  char reason[kReasonBytes];
};

SharedMemory::SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks,
                           const Layout& layout)
    : ranks_(ranks), layout_(layout), part_bytes_(layout.front + layout.slots * layout.slot_bytes) {
  MPI_Comm_rank(communicator, &rank_);
  const int size = static_cast<int>(ranks_.size());
  spin_seconds_ = size <= cores(communicator) ? kSpinSeconds : 0;
  const int64_t counters = static_cast<int64_t>(sizeof(ArrivalCounter)) * size;
  const int64_t start = whole_pages(whole_pages(sizeof(Header)) + counters);
  block_bytes_ = start + part_bytes_ * size;

  // The first rank creates the block, the others open it by its name, and then it is unlinked.
  char name[64] = "";
  std::string why;
  const auto failed = [&why] {
    if (why.empty()) why = std::strerror(errno);
  };
  if (rank_ == 0) {
    std::snprintf(name, sizeof name, "%s", new_name().c_str());
    if (name[0] != '\0') file_ = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file_ < 0 || ftruncate(file_, block_bytes_) != 0 || !reserve(0, start)) failed();
  }
  const bool created = file_ >= 0;
  MPI_Bcast(name, sizeof name, MPI_CHAR, 0, communicator);
  if (rank_ != 0) file_ = shm_open(name, O_RDWR, 0);
  if (file_ >= 0) {
    const int64_t part = start + rank_ * part_bytes_;
    bool reserved = reserve(part, layout.front);
    for (int64_t i = 0; i < layout.slots && reserved; ++i)
      reserved = reserve(part + layout.front + i * layout.slot_bytes, layout.slot_front);
    void* mapped = MAP_FAILED;
    if (reserved)
      mapped = mmap(nullptr, block_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) {
      failed();
    } else {
      block_ = static_cast<char*>(mapped);
    }
  } else {
    failed();
  }
  int problem = why.empty() ? 0 : 1;
  MPI_Allreduce(MPI_IN_PLACE, &problem, 1, MPI_INT, MPI_MAX, communicator);
  if (rank_ == 0 && created) shm_unlink(name);
  if (problem) {
    if (block_) munmap(block_, block_bytes_);
    if (file_ >= 0) close(file_);
    throw std::runtime_error(why.empty() ? "another rank could not" : why);
  }
  header_ = reinterpret_cast<Header*>(block_);
  if (rank_ == 0) new (header_) Header;
  new (&counter(rank_)) ArrivalCounter;
  MPI_Barrier(communicator);
}

SharedMemory::~SharedMemory() {
  munmap(block_, block_bytes_);
  close(file_);
}

// Without this, a write to a full /dev/shm would kill the process (SIGBUS).
bool SharedMemory::reserve(int64_t offset, int64_t bytes) {
  if (bytes == 0) return true;
  errno = posix_fallocate(file_, offset, bytes);
  return errno == 0;
}

bool SharedMemory::commit() {
  return reserve(front(rank_) - block_ + layout_.front, layout_.slots * layout_.slot_bytes);
}

SharedMemory::ArrivalCounter& SharedMemory::counter(int rank) const {
  return reinterpret_cast<ArrivalCounter*>(block_ + whole_pages(sizeof(Header)))[rank];
}

char* SharedMemory::front(int rank) const {
  return block_ + block_bytes_ - part_bytes_ * (static_cast<int64_t>(ranks_.size()) - rank);
}

char* SharedMemory::slot(int rank, uint64_t index) const {
  return front(rank) + layout_.front + static_cast<int64_t>(index) * layout_.slot_bytes;
}

bool SharedMemory::all_have_arrived() const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (counter(static_cast<int>(r)).arrived.load(std::memory_order_seq_cst) < step_) return false;
  }
  return true;
}

void SharedMemory::barrier(const Waiting& waiting) {
  // Sequentially consistent, like the two steps of sleep(), or a wake-up could be lost: the rank
  // whose store is last in the total order sees all other arrivals and all ranks that sleep.
  counter(rank_).arrived.store(++step_, std::memory_order_seq_cst);
  if (all_have_arrived()) {
    if (header_->sleepers.load(std::memory_order_seq_cst) > 0) {
      header_->wakeups.fetch_add(1, std::memory_order_seq_cst);
      syscall(SYS_futex, &header_->wakeups, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    return;
  }
  if (spin_seconds_ > 0) {
    const auto start = Clock::now();
    do {
      for (int i = 0; i < 50; ++i) {
        if (all_have_arrived()) return;
        pause();
      }
    } while (seconds_since(start) < spin_seconds_);
  }
  sleep(waiting);
}

void SharedMemory::check_aborted() const {
  if (header_->aborted.load(std::memory_order_acquire) == 2) throw Aborted(header_->reason);
}

void SharedMemory::sleep(const Waiting& waiting) {
  const auto start = Clock::now();
  while (true) {
    header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t wakeups = header_->wakeups.load(std::memory_order_seq_cst);
    const bool here = all_have_arrived();
    if (!here) {
      const timespec limit = {0, kAbortCheckNanoseconds};
      syscall(SYS_futex, &header_->wakeups, FUTEX_WAIT, wakeups, &limit, nullptr, 0);
    }
    header_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (here || all_have_arrived()) return;
    check_aborted();
    std::vector<int> missing;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (counter(static_cast<int>(r)).arrived.load(std::memory_order_acquire) < step_)
        missing.push_back(ranks_[r]);
    }
    const std::string why = waiting(seconds_since(start), missing);
    if (!why.empty()) abort(why);
  }
}

void SharedMemory::abort(const std::string& why) {
  uint32_t nobody = 0;
  if (header_->aborted.compare_exchange_strong(nobody, 1)) {
    const size_t n = std::min(why.size(), kReasonBytes - 1);
    std::memcpy(header_->reason, why.data(), n);
    header_->reason[n] = '\0';
    header_->aborted.store(2, std::memory_order_release);
    header_->wakeups.fetch_add(1);
    syscall(SYS_futex, &header_->wakeups, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    throw Aborted(why);
  }
  while (header_->aborted.load(std::memory_order_acquire) != 2) sched_yield();
  throw Aborted(header_->reason);
}

}  // namespace hvd
