#include "core/cpu/host_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/log.h"
#include "core/math/adasum.h"
#include "core/math/reduce.h"

namespace hvd {
namespace {

// Slots and results stay in the caches.
constexpr int64_t kChunkBytes = 1 << 20;

// Up to this, each rank reduces everything itself, after one barrier. So much of each slot is
// committed from the start.
constexpr int64_t kSmallBytes = 16 << 10;

// A slot. The page between keeps the slots of all ranks from falling on the same lines of a cache.
constexpr int64_t kSlotBytes = kChunkBytes + 4096;

constexpr int64_t kWidest = 8;  // bytes of an element

// Where blocks of these sizes begin.
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

HostTransport::HostTransport(std::unique_ptr<MpiTransport>* mpi)
    : memory_((*mpi)->communicator(), (*mpi)->ranks(), {0, 4, kSlotBytes, kSmallBytes}),
      chunk_bytes_(kSmallBytes),
      mpi_(std::move(*mpi)) {}

// Two slots per rank, used in turn: what is written before a barrier stays until after the next
// one.
char* HostTransport::slot(int rank, uint64_t step) const { return memory_.slot(rank, step % 2); }

// Likewise the results, which are written after one barrier and read after the next.
char* HostTransport::result(int rank, uint64_t step) const {
  return memory_.slot(rank, 2 + step % 2);
}

// Before so many bytes are moved, as many on all ranks. If a rank cannot commit its slots, what is
// there must do.
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

std::vector<Proposal> HostTransport::agree(const Proposal& mine, const Waiting& waiting) {
  waiting_ = waiting;
  const uint64_t step = memory_.step();
  std::memcpy(slot(rank(), step), &mine, sizeof mine);
  barrier();
  std::vector<Proposal> all(size());
  for (int r = 0; r < size(); ++r) std::memcpy(&all[r], slot(r, step), sizeof mine);
  return all;
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

// The others may wait in either.
void HostTransport::abort(const std::string& why) {
  try {
    mpi_->abort(why);
  } catch (const Aborted&) {  // so it always ends
  }
  memory_.abort(why);
}

void HostTransport::check_aborted() {
  memory_.check_aborted();
  mpi_->check_aborted();
}

Status HostTransport::allreduce(Request& request) {
  for (DTypeGroup& group : by_dtype(request))
    reduce_stream(request, group.dtype, group.in, group.out);
  return {};
}

void HostTransport::reduce_stream(const Request& request, DType dtype, ByteCursor& in,
                                  ByteCursor& out) {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  std::vector<const void*> sources(size());
  const auto combine = [&](int64_t bytes, char* target) {
    reduce(dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
           bytes / width, target);
  };
  if (in.left() <= kSmallBytes) {
    const int64_t bytes = in.left();
    const uint64_t step = memory_.step();
    in.copy_to(slot(rank(), step), bytes);
    barrier();
    for (int r = 0; r < size(); ++r) sources[r] = slot(r, step);
    combine(bytes, result(rank(), step));
    out.copy_from(result(rank(), step), bytes);
    return;
  }
  make_room(in.left());
  struct Chunk {
    uint64_t step;
    int64_t elements;
    ByteCursor own;  // this rank's slice, which only it reads: it stays where it is
  };
  // The first byte of a rank's slice.
  const auto bound = [&](const Chunk& chunk, int r) { return chunk.elements * r / size() * width; };
  const auto pack = [&] {
    Chunk chunk{memory_.step(), std::min(in.left(), chunk_bytes_) / width, ByteCursor(dtype)};
    for (int r = 0; r < size(); ++r) {
      const int64_t start = bound(chunk, r), bytes = bound(chunk, r + 1) - start;
      if (r == rank()) {
        chunk.own = in.take(bytes);
      } else {
        in.copy_to(slot(rank(), chunk.step) + start, bytes);
      }
    }
    return chunk;
  };
  Chunk chunk = pack();
  barrier();
  while (chunk.elements > 0) {
    const int64_t start = bound(chunk, rank());
    for (int64_t done = 0; chunk.own.left() > 0;) {
      for (int r = 0; r < size(); ++r) sources[r] = slot(r, chunk.step) + start + done;
      const int64_t before = chunk.own.left();
      sources[rank()] = chunk.own.read(slot(rank(), chunk.step) + start + done);
      const int64_t bytes = before - chunk.own.left();
      combine(bytes, result(rank(), chunk.step) + done);
      done += bytes;
    }
    Chunk next = pack();
    barrier();
    for (int r = 0; r < size(); ++r)
      out.copy_from(result(r, chunk.step), bound(chunk, r + 1) - bound(chunk, r));
    chunk = std::move(next);
  }
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
      reduce(input.dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
             std::min(room, mine - start) / width, static_cast<char*>(request.outputs[i]) + start);
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
  for (int64_t left = in.left(); left > 0; left -= chunk_bytes_) {
    const int64_t bytes = std::min(left, chunk_bytes_);
    const uint64_t step = memory_.step();
    if (root) in.copy_to(slot(rank(), step), bytes);
    barrier();
    if (!root) out.copy_from(slot(root_rank, step), bytes);
  }
  return {};
}

// Each rank's bytes to each, through parts of the slots. `longest` is what any rank has for
// another; `take` is called with the position in it, how much has come at most, and where it is, by
// rank.
template <typename Take>
void HostTransport::scatter(std::vector<ByteCursor>& to, int64_t longest, const Take& take) {
  make_room(longest * size());
  const int64_t room = chunk_bytes_ / size() / kWidest * kWidest;
  for (int64_t start = 0; start < longest; start += room) {
    const uint64_t step = memory_.step();
    for (int r = 0; r < size(); ++r)
      to[r].copy_to(slot(rank(), step) + r * room, std::min(room, to[r].left()));
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

// Every rank's bytes into the targets of all, by rank.
void HostTransport::share(const void* mine, const std::vector<int64_t>& sizes,
                          const std::vector<char*>& targets) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const char* own = static_cast<const char*>(mine);
  if (sizes[rank()] > 0) std::memcpy(targets[rank()], own, sizes[rank()]);
  make_room(longest);
  const int64_t room = chunk_bytes_;
  for (int64_t start = 0; start < longest; start += room) {
    const auto bytes = [&](int r) { return std::clamp<int64_t>(sizes[r] - start, 0, room); };
    const uint64_t step = memory_.step();
    if (bytes(rank()) > 0) std::memcpy(slot(rank(), step), own + start, bytes(rank()));
    barrier();
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && bytes(r) > 0) std::memcpy(targets[r] + start, slot(r, step), bytes(r));
    }
  }
}

// As many from each rank.
template <typename Number>
std::vector<Number> HostTransport::share_numbers(const std::vector<Number>& mine) {
  const std::vector<int64_t> sizes(size(), static_cast<int64_t>(mine.size() * sizeof(Number)));
  std::vector<Number> all(mine.size() * size());
  share(mine.data(), sizes, one_after_another(sizes, all.data()));
  return all;
}

Status HostTransport::agree_on(const Status& mine, const Request& request) {
  return all_or_none(mine, share_numbers<int64_t>({mine.ok() ? 0 : 1}), ranks(), request);
}

}  // namespace hvd
