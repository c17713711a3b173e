// How the ranks of a fake's communicator reach each other: a block of shared memory, in which
// each has a slot, and a count of the steps that it has come to.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace fake_cuda {

// The communicator was aborted while a rank waited in it.
struct Aborted {};

class Wire {
 public:
  static constexpr int kMaxRanks = 8;
  static constexpr int64_t kSlotBytes = 1 << 18;
  static constexpr size_t kTextBytes = 1 << 14;

  // Of the ranks that give the same name; does not wait for them.
  Wire(const std::string& name, int rank, int size);
  ~Wire();

  // All ranks come to the next step; what was written before can be read after it.
  void barrier();
  void remove_name();  // when all are there

  char* slot(int rank) const;
  char* text(int rank) const;

  std::atomic<bool> aborted{false};
  std::atomic<bool> stopped{false};  // this rank comes to no step any more

 private:
  const std::string name_;
  const int rank_, size_;
  uint64_t step_ = 0;
  char* block_ = nullptr;
};

}  // namespace fake_cuda
