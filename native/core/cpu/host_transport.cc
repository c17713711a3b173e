#include "core/cpu/host_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/log.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

// Small enough for slots and results to stay in the caches.
constexpr int64_t kChunkBytes = 1 << 20;

// Up to this size each rank reduces everything itself, after one barrier. As much of each slot is
// committed from the start.
constexpr int64_t kSmallBytes = 16 << 10;

// A slot and one page, so that the slots of all ranks do not map to the same cache sets.
constexpr int64_t kSlotBytes = kChunkBytes + 4096;

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

std::vector<Proposal> HostTransport::agree(const Proposal& mine, const Waiting& waiting) {
  waiting_ = waiting;
  const uint64_t step = memory_.step();
  std::memcpy(slot(rank(), step), &mine, sizeof mine);
  barrier();
  std::vector<Proposal> all(size());
  for (int r = 0; r < size(); ++r) std::memcpy(&all[r], slot(r, step), sizeof mine);
  return all;
}

// The other ranks may be waiting in shared memory or in MPI.
void HostTransport::abort(const std::string& why) {
  try {
    mpi_->abort(why);
  } catch (const Aborted&) {  // which abort() always throws
  }
  memory_.abort(why);
}

void HostTransport::check_aborted() {
  memory_.check_aborted();
  mpi_->check_aborted();
}

Status HostTransport::run(Request& request, const Waiting& waiting) {
  if (request.kind != Kind::allreduce || request.reduction == Reduction::adasum)
    return KindTransport::run(request, waiting);
  waiting_ = waiting;
  return allreduce(request);
}

Status HostTransport::allreduce(Request& request) {
  for (DTypeGroup& group : by_dtype(request)) reduce(request, group.dtype, group.in, group.out);
  return {};
}

void HostTransport::reduce(const Request& request, DType dtype, ByteCursor& in, ByteCursor& out) {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  std::vector<const void*> sources(size());
  const auto combine = [&](int64_t bytes, char* target) {
    loops().reduce(dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
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
    ByteCursor own;  // this rank's slice: only this rank reads it, so it is not copied
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

}  // namespace hvd
