// What HostTransport does besides allreduce.
#include <algorithm>
#include <cstring>

#include "core/cpu/host_transport.h"
#include "core/math/loops.h"
#include "core/math/send.h"

namespace hvd {
// The other ranks may be waiting in shared memory or in MPI.
void HostTransport::abort(const std::string& why) {
  try {
    mpi_->abort(why);
  } catch (const Aborted&) {  // which abort() always throws
  }
  memory_.counters().abort(why);
}

void HostTransport::check_aborted() {
  memory_.counters().check_aborted();
  mpi_->check_aborted();
}

void HostTransport::reducescatter(const Request& request, size_t i) {
  const DType dtype = request.inputs[i].dtype;
  const std::vector<int64_t> begin = scattered(request.inputs[i], size());
  const char* in = static_cast<const char*>(request.inputs[i].data);
  std::vector<ByteCursor> to(size());
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) to[r].add(in + begin[r], begin[r + 1] - begin[r]);
  }
  const int64_t mine = begin[rank() + 1] - begin[rank()];
  std::vector<const void*> sources(size());
  // Rank 0 gets the most rows.
  scatter(to, begin[1], [&](int64_t start, int64_t room, const auto& part_of) {
    if (start >= mine) return;
    for (int r = 0; r < size(); ++r) sources[r] = r == rank() ? in + begin[r] + start : part_of(r);
    loops().reduce(dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
                   std::min(room, mine - start) / size_of(dtype),
                   static_cast<char*>(request.outputs[i]) + start);
  });
}

void HostTransport::broadcast(Request& request) {
  const int root_rank = number_in_set(request.root);
  const bool root = rank() == root_rank;
  auto [in, out] = broadcast_tensors(request);
  make_room(in.left());
  use_slots(SlotUse::barriers);
  for (int64_t left = in.left(); left > 0; left -= chunk_bytes_) {
    const int64_t bytes = std::min(left, chunk_bytes_);
    const uint64_t step = memory_.step();
    if (root) in.send_to(slot(rank(), step), bytes);
    barrier();
    if (!root) out.copy_from(slot(root_rank, step), bytes);
  }
}

// Sends bytes from each rank to each, in rounds; a slot has a part per receiver. `longest` is the
// most that any rank sends to another. In each round calls take(start, room, part_of): at most
// `room` bytes from `start` on have arrived, those of rank r at part_of(r).
template <typename Take>
void HostTransport::scatter(std::vector<ByteCursor>& to, int64_t longest, const Take& take) {
  make_room(longest * size());
  use_slots(SlotUse::barriers);
  const int64_t room = chunk_bytes_ / size() / kWidest * kWidest;
  for (int64_t start = 0; start < longest; start += room) {
    const uint64_t step = memory_.step();
    for (int r = 0; r < size(); ++r)
      to[r].send_to(slot(rank(), step) + r * room, std::min(room, to[r].left()));
    barrier();
    take(start, room, [&](int r) { return slot(r, step) + rank() * room; });
  }
}

void HostTransport::exchange(const std::vector<Part>& sent, const std::vector<Part>& received) {
  std::vector<ByteCursor> to(size()), from(size());
  for (const Part& part : sent) {
    if (part.rank != rank()) to[part.rank].add(part.data, part.bytes);
  }
  for (const Part& part : received) {
    if (part.rank != rank()) from[part.rank].add(part.data, part.bytes);
  }
  copy_own(sent, received, rank());
  int64_t longest = 0;
  for (const ByteCursor& cursor : to) longest = std::max(longest, cursor.left());
  for (int64_t others : share_numbers<int64_t>({longest})) longest = std::max(longest, others);
  scatter(to, longest, [&](int64_t, int64_t room, const auto& part_of) {
    for (int r = 0; r < size(); ++r) from[r].copy_from(part_of(r), std::min(room, from[r].left()));
  });
}

void HostTransport::gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const char* own = static_cast<const char*>(mine);
  std::vector<char*> targets = {static_cast<char*>(all)};
  for (int64_t bytes : sizes) targets.push_back(targets.back() + bytes);
  if (sizes[rank()] > 0) std::memcpy(targets[rank()], own, sizes[rank()]);
  if (longest > kSmallBytes) {
    make_room(longest);
    use_slots(SlotUse::barriers);
  }
  const bool small = longest <= kSmallBytes;
  const int64_t room = small ? kSmallBytes : chunk_bytes_;
  const auto place = [&](int r, uint64_t step) {
    return small ? small_slot(r, step) : slot(r, step);
  };
  for (int64_t start = 0; start < longest; start += room) {
    const auto bytes = [&](int r) { return std::clamp<int64_t>(sizes[r] - start, 0, room); };
    const uint64_t step = memory_.step();
    if (bytes(rank()) > 0) send(own + start, bytes(rank()), place(rank(), step));
    barrier();
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && bytes(r) > 0) std::memcpy(targets[r] + start, place(r, step), bytes(r));
    }
  }
}

}  // namespace hvd
