// What HostTransport does besides allreduce.
#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "core/cpu/host_transport.h"
#include "core/math/adasum.h"
#include "core/math/loops.h"
#include "core/math/send.h"

namespace hvd {
namespace {

constexpr int64_t kWidest = 8;  // bytes of the widest dtype

// The addresses of contiguous blocks of these sizes.
std::vector<char*> one_after_another(const std::vector<int64_t>& sizes, void* start) {
  std::vector<char*> blocks;
  char* block = static_cast<char*>(start);
  for (int64_t bytes : sizes) {
    blocks.push_back(block);
    block += bytes;
  }
  return blocks;
}

}  // namespace

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

// Commits whole slots before the first request that is larger than what is committed. `bytes` is
// equal on all ranks. If a rank cannot commit its slots, all go on with what they have.
void HostTransport::make_room(int64_t bytes) {
  if (bytes <= chunk_bytes_ || asked_for_room_) return;
  asked_for_room_ = true;
  const std::vector<int64_t> failed = share_numbers<int64_t>({memory_.commit() ? 0 : 1});
  if (std::count(failed.begin(), failed.end(), 0) == size()) {
    chunk_bytes_ = kChunkBytes;
  } else if (rank() == 0) {
    log(LogLevel::warning, no_room_text(chunk_bytes_));
  }
}

std::vector<std::string> HostTransport::gather(const std::string& mine, const Waiting& waiting) {
  waiting_ = waiting;
  const std::vector<int64_t> sizes = share_numbers<int64_t>({static_cast<int64_t>(mine.size())});
  std::vector<std::string> parts;
  std::vector<char*> targets;
  for (int64_t size : sizes) parts.emplace_back(size, '\0');
  for (std::string& part : parts) targets.push_back(part.data());
  share(mine.data(), sizes, targets);
  return parts;
}

Status HostTransport::adasum(Request& request) {
  hvd::adasum(request, rank(), size(),
              {[this](const auto& sent, const auto& received) { exchange(sent, received); },
               [this](const auto& mine) { return share_numbers<double>(mine); },
               [this](const void* mine, const auto& sizes, void* all) {
                 share(mine, sizes, one_after_another(sizes, all));
               }});
  return {};
}

Status HostTransport::reducescatter(Request& request) {
  Status status = allocate_scattered(request, rank(), size());
  if (status = agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    Shape row = input.shape;
    row[0] = 1;
    const int64_t width = static_cast<int64_t>(size_of(input.dtype)), of_row = elements(row);
    const auto begin = [&](int r) { return first_row(input.shape[0], r, size()) * of_row * width; };
    const char* in = static_cast<const char*>(input.data);
    std::vector<ByteCursor> to(size());
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) to[r].add(in + begin(r), begin(r + 1) - begin(r));
    }
    const int64_t mine = begin(rank() + 1) - begin(rank());
    std::vector<const void*> sources(size());
    // Rank 0 gets the most rows.
    scatter(to, begin(1), [&](int64_t start, int64_t room, const auto& part_of) {
      if (start >= mine) return;
      for (int r = 0; r < size(); ++r)
        sources[r] = r == rank() ? in + begin(r) + start : part_of(r);
      loops().reduce(input.dtype, request.reduction, factors_of(request, size()), sources.data(),
                     size(), std::min(room, mine - start) / width,
                     static_cast<char*>(request.outputs[i]) + start);
    });
  }
  return {};
}

Status HostTransport::allgather(Request& request) {
  std::vector<int64_t> my_rows;
  for (const Input& input : request.inputs) my_rows.push_back(input.shape[0]);
  const std::vector<int64_t> rows = share_numbers(my_rows);

  std::vector<std::vector<int64_t>> sizes;
  Status status = allocate_gathered(request, rows, size(), &sizes);
  if (status = agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < sizes.size(); ++i)
    share(request.inputs[i].data, sizes[i], one_after_another(sizes[i], request.outputs[i]));
  return {};
}

Status HostTransport::alltoall(Request& request) {
  std::vector<int64_t> my_splits;
  for (size_t i = 1; i < request.inputs.size(); i += 2) {
    const int64_t* own = static_cast<const int64_t*>(request.inputs[i].data);
    my_splits.insert(my_splits.end(), own, own + size());
  }
  const std::vector<int64_t> splits = share_numbers(my_splits);
  std::vector<Part> sent, received;
  Status status = allocate_exchanged(request, splits, rank(), size(), &sent, &received);
  if (status = agree_on(status, request); !status.ok()) return status;
  exchange(sent, received);
  return {};
}

Status HostTransport::broadcast(Request& request) {
  const bool root = ranks()[rank()] == request.root;
  const int root_rank =
      static_cast<int>(std::find(ranks().begin(), ranks().end(), request.root) - ranks().begin());
  ByteCursor in, out;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const int64_t bytes = static_cast<int64_t>(input.bytes());
    in.add(input.data, bytes);
    out.add(request.outputs[i], bytes);
    if (root && bytes > 0 && request.outputs[i] != input.data)
      std::memcpy(request.outputs[i], input.data, bytes);
  }
  make_room(in.left());
  use_slots(SlotUse::barriers);
  for (int64_t left = in.left(); left > 0; left -= chunk_bytes_) {
    const int64_t bytes = std::min(left, chunk_bytes_);
    const uint64_t step = memory_.step();
    if (root) in.send_to(slot(rank(), step), bytes);
    barrier();
    if (!root) out.copy_from(slot(root_rank, step), bytes);
  }
  return {};
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

// Allgather: copies every rank's bytes to `targets`, by rank, on all ranks.
void HostTransport::share(const void* mine, const std::vector<int64_t>& sizes,
                          const std::vector<char*>& targets) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const char* own = static_cast<const char*>(mine);
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

// The numbers of all ranks, by rank; equally many from each.
template <typename Number>
std::vector<Number> HostTransport::share_numbers(const std::vector<Number>& mine) {
  const std::vector<int64_t> sizes(size(), static_cast<int64_t>(mine.size() * sizeof(Number)));
  std::vector<Number> all(mine.size() * size());
  share(mine.data(), sizes, one_after_another(sizes, all.data()));
  return all;
}

template std::vector<int64_t> HostTransport::share_numbers(const std::vector<int64_t>& mine);

Status HostTransport::agree_on(const Status& mine, const Request& request) {
  return all_or_none(mine, share_numbers<int64_t>({mine.ok() ? 0 : 1}), ranks(), request);
}

}  // namespace hvd
