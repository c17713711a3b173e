// Collectives from what a transport can do: sums, and the movement of bytes.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/shared_memory.h"
#include "core/math/byte_cursor.h"
#include "core/math/layout.h"
#include "core/request/transport.h"

namespace hvd {

class KindTransport : public Transport {
 public:
  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override;
  std::vector<int64_t> gather_numbers(const std::vector<int64_t>& mine,
                                      const Waiting& waiting) override {
    begin(waiting);
    return share_numbers(mine);
  }
  Status run(Request& request, const Waiting& waiting) override;

  // Before each collective.
  virtual void begin(const Waiting& waiting) { waiting_ = waiting; }

  // Of a request, but Adasum; or a reduce, whose outputs count on its root alone.
  virtual void allreduce(Request& request) = 0;
  virtual void broadcast(Request& request) = 0;
  // Of one input, whose output is allocated.
  virtual void reducescatter(const Request& request, size_t i) = 0;

  // Allgather of bytes; `sizes`, by rank, are known to all.
  virtual void gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) = 0;

  // Alltoall.
  virtual void exchange(const std::vector<Part>& sent, const std::vector<Part>& received) = 0;

 protected:
  bool gets_sums(const Request& request) const {
    return request.kind != Kind::reduce || ranks()[rank()] == request.root;
  }

  // Allgather of numbers, equally many from each rank.
  template <typename Number>
  std::vector<Number> share_numbers(const std::vector<Number>& mine) {
    std::vector<Number> all(mine.size() * size());
    gather_bytes(mine.data(), std::vector<int64_t>(size(), mine.size() * sizeof(Number)),
                 all.data());
    return all;
  }

  // The inputs and outputs of a broadcast. Copies the root's to its outputs.
  std::pair<ByteCursor, ByteCursor> broadcast_tensors(const Request& request) const;

  // The tensors of an allreduce, if they are of one dtype, on the host and at most so many bytes,
  // so that it is faster if each rank sums all of them than if each sums a slice.
  static std::optional<DTypeGroup> small_group(const Request& request, int64_t most);

  // For slots of `whole` bytes in shared memory, of which `committed` are: commits all of them
  // before the first request that is larger. `bytes` is equal on all ranks. If a rank cannot, all
  // go on with what they have: their messages must match.
  void make_room(SharedMemory& memory, int64_t bytes, int64_t whole, int64_t* committed);

  Waiting waiting_;  // of the call in progress

 private:
  void adasum(Request& request);  // in adasum.cc

  bool asked_for_room_ = false;
};

}  // namespace hvd
