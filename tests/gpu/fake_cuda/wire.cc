#include "wire.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

struct Header {
  std::atomic<uint64_t> arrived[Wire::kMaxRanks];
};

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kBlockBytes =
    kHeaderBytes + Wire::kMaxRanks * (Wire::kTextBytes + Wire::kSlotBytes);

}  // namespace

Wire::Wire(const std::string& name, int rank, int size) : name_(name), rank_(rank), size_(size) {
  if (size > kMaxRanks) violation("more ranks than the fake has room for");
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);  // new memory is all zero
  if (file < 0 || ftruncate(file, kBlockBytes) != 0) violation("no shared memory");
  void* memory = mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) violation("no shared memory");
  block_ = static_cast<char*>(memory);
}

Wire::~Wire() {
  shm_unlink(name_.c_str());
  munmap(block_, kBlockBytes);
}

void Wire::remove_name() { shm_unlink(name_.c_str()); }

void Wire::barrier() {
  auto& arrived = reinterpret_cast<Header*>(block_)->arrived;
  while (stopped && !aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (aborted) throw Aborted();
  arrived[rank_].store(++step_, std::memory_order_release);
  int looks = 0;
  for (int r = 0; r < size_; ++r) {
    while (arrived[r].load(std::memory_order_acquire) < step_) {
      if (aborted) throw Aborted();
      if (++looks < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
}

char* Wire::text(int rank) const { return block_ + kHeaderBytes + rank * kTextBytes; }

char* Wire::slot(int rank) const {
  return block_ + kHeaderBytes + kMaxRanks * kTextBytes + rank * kSlotBytes;
}

}  // namespace fake_cuda
