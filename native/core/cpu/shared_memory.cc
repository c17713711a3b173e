#include "core/cpu/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "core/base/cores.h"
#include "core/base/process_wide.h"
#include "core/base/threads.h"
#include "core/cpu/mpi_wait.h"

namespace hvd {
namespace {

// The most of all sets so far: the first one is that of all ranks, with which those of a smaller
// one share their cores, too. Each rank may be bound to other cores.
int ranks_per_core(MPI_Comm communicator, int ranks) {
  struct Most {
    std::atomic<int> ranks{1};
  };
  std::atomic<int>& most = of_process<Most>().ranks;
  Cores mask = affinity();
  double quota = cpu_quota;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, mask.data(), sizeof mask, MPI_BYTE, MPI_BOR, communicator));
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &quota, 1, MPI_DOUBLE, MPI_MIN, communicator));
  const int cores = std::max(1, static_cast<int>(std::min<double>(count(mask), quota)));
  return most = std::max<int>(most, (ranks + cores - 1) / cores);
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

}  // namespace

SharedMemory::SharedMemory(MPI_Comm communicator, const std::vector<int>& ranks,
                           std::vector<Area> areas)
    : SharedMemory(nullptr, 0, ranks, std::move(areas)) {
  rank_ = rank_in(communicator);
  const int per_core = ranks_per_core(communicator, size_);

  // The first rank creates the block, the others open it by its name, and then it is unlinked.
  char name[64] = "";
  std::string why;
  const auto failed = [&why] {
    if (why.empty()) why = std::strerror(errno);
  };
  if (rank_ == 0) {
    std::snprintf(name, sizeof name, "%s", new_name().c_str());
    if (name[0] != '\0') file_ = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file_ < 0 || ftruncate(file_, block_bytes_) != 0 || !reserve(0, front_bytes_)) failed();
  }
  const bool created = file_ >= 0;
  HVD_MPI(MPI_Bcast(name, sizeof name, MPI_CHAR, 0, communicator));
  if (rank_ != 0) file_ = shm_open(name, O_RDWR, 0);
  if (file_ >= 0) {
    void* mapped = MAP_FAILED;
    if (reserve_areas(&Area::front))
      mapped = mmap(nullptr, block_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) {
      failed();
    } else {
      block_ = static_cast<char*>(mapped);
      madvise(block_, block_bytes_, MADV_DONTFORK);  // a child must not write into a live job
    }
  } else {
    failed();
  }
  int problem = why.empty() ? 0 : 1;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &problem, 1, MPI_INT, MPI_MAX, communicator));
  if (rank_ == 0 && created) shm_unlink(name);
  if (problem) throw std::runtime_error(why.empty() ? "another rank could not" : why);
  counters_ = std::make_unique<HostCounters>(block_, rank_, ranks, per_core);
  HVD_MPI(MPI_Barrier(communicator));  // the name is gone
}

SharedMemory::~SharedMemory() {
  if (file_ < 0) return;
  if (block_) munmap(block_, block_bytes_);
  close(file_);
}

// Without this, a write to a full /dev/shm would kill the process (SIGBUS).
bool SharedMemory::reserve(int64_t offset, int64_t bytes) {
  if (bytes == 0 || file_ < 0) return true;
  const SignalsBlocked or_a_fast_timer_interrupts_each_try;
  do {
    errno = posix_fallocate(file_, offset, bytes);
  } while (errno == EINTR);
  return errno == 0;
}

bool SharedMemory::reserve_areas(int64_t Area::* bytes) {
  int64_t offset = front_bytes_ + part_bytes_ * rank_;
  for (const Area& area : areas_) {
    if (!reserve(offset, area.*bytes)) return false;
    offset += area.bytes;
  }
  return true;
}

bool SharedMemory::commit() { return reserve_areas(&Area::bytes); }

char* SharedMemory::area(int rank, size_t index) const {
  char* start = block_ + front_bytes_ + part_bytes_ * rank;
  for (size_t i = 0; i < index; ++i) start += areas_[i].bytes;
  return start;
}

}  // namespace hvd
