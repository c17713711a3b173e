#include "core/host_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/reduce.h"

namespace hvd {
namespace {

// Slots and results stay in the caches.
constexpr int64_t kChunkBytes = 1 << 20;

// Below this, each rank reduces everything itself, after one meeting.
constexpr int64_t kSmallBytes = 16 << 10;

// A slot. The page between keeps the slots of all ranks from falling on the same lines of a cache.
constexpr int64_t kSlotBytes = kChunkBytes + 4096;

}  // namespace

HostTransport::HostTransport(std::unique_ptr<MpiTransport>* mpi)
    : memory_((*mpi)->communicator(), (*mpi)->ranks(), 4 * kSlotBytes), mpi_(std::move(*mpi)) {}

// Two slots per rank, used in turn: what is written before a meeting stays until after the next.
char* HostTransport::slot(int rank, uint64_t step) const {
  return memory_.part(rank) + step % 2 * kSlotBytes;
}

// So it is with the rank's results, which are written after one meeting and read after the next.
char* HostTransport::result(int rank, uint64_t step) const {
  return memory_.part(rank) + (2 + step % 2) * kSlotBytes;
}

std::vector<Ballot> HostTransport::agree(const Ballot& mine, const Waiting& waiting) {
  waiting_ = waiting;
  const uint64_t step = memory_.step();
  std::memcpy(slot(rank(), step), &mine, sizeof mine);
  meet();
  std::vector<Ballot> all(size());
  for (int r = 0; r < size(); ++r) std::memcpy(&all[r], slot(r, step), sizeof mine);
  return all;
}

std::vector<std::string> HostTransport::gather(const std::string& mine, const Waiting& waiting) {
  waiting_ = waiting;
  const std::vector<int64_t> sizes = share_numbers({static_cast<int64_t>(mine.size())});
  std::vector<std::string> parts;
  std::vector<char*> targets;
  for (int64_t size : sizes) parts.emplace_back(size, '\0');
  for (std::string& part : parts) targets.push_back(part.data());
  share(mine.data(), sizes, targets);
  return parts;
}

Status HostTransport::run(Request& request, const Waiting& waiting) {
  waiting_ = waiting;
  if (request.kind == Kind::allreduce && request.reduction != Reduction::adasum) {
    allreduce(request);
    return {};
  }
  if (request.kind == Kind::allgather) return allgather(request);
  if (request.kind == Kind::broadcast) {
    broadcast(request);
    return {};
  }
  return mpi_->run(request, waiting);
}

// The others may wait in either.
void HostTransport::give_up(const std::string& why) {
  try {
    mpi_->give_up(why);
  } catch (const Lost&) {  // so it always ends
  }
  memory_.give_up(why);
}

void HostTransport::listen() {
  memory_.listen();
  mpi_->listen();
}

void HostTransport::allreduce(Request& request) {
  for (OfOneDType& group : by_dtype(request))
    reduce_stream(request, group.dtype, group.in, group.out);
}

void HostTransport::reduce_stream(const Request& request, DType dtype, Stream& in, Stream& out) {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  std::vector<const void*> sources(size());
  // Of the slots of a step, from one element on.
  const auto combine = [&](uint64_t step, int64_t start, int64_t count, void* target) {
    for (int r = 0; r < size(); ++r) sources[r] = slot(r, step) + start * width;
    reduce(dtype, request.reduction, request.prescale, request.postscale, sources.data(), size(),
           count, target);
  };
  const auto pack = [&] {
    const int64_t bytes = std::min(in.left(), kChunkBytes);
    in.copy_to(slot(rank(), memory_.step()), bytes);
    return bytes;
  };
  int64_t bytes = pack();
  uint64_t step = memory_.step();
  meet();
  if (bytes <= kSmallBytes && in.left() == 0) {
    char* whole = result(rank(), step);
    combine(step, 0, bytes / width, whole);
    out.copy_from(whole, bytes);
    return;
  }
  while (bytes > 0) {
    const int64_t count = bytes / width;
    const auto bound = [&](int r) { return count * r / size(); };
    combine(step, bound(rank()), bound(rank() + 1) - bound(rank()), result(rank(), step));
    const int64_t next = pack();
    const uint64_t next_step = memory_.step();
    meet();
    for (int r = 0; r < size(); ++r)
      out.copy_from(result(r, step), (bound(r + 1) - bound(r)) * width);
    bytes = next;
    step = next_step;
  }
}

Status HostTransport::allgather(Request& request) {
  std::vector<int64_t> my_rows;
  for (const Input& input : request.inputs) my_rows.push_back(input.shape[0]);
  const std::vector<int64_t> rows = share_numbers(my_rows);

  std::vector<std::vector<int64_t>> sizes;
  Status status = allocate_gathered(request, rows, size(), &sizes);
  status = all_or_none(status, share_numbers({status.ok() ? 0 : 1}), ranks(), request);
  if (!status.ok()) return status;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<char*> targets;
    char* target = static_cast<char*>(request.outputs[i]);
    for (int64_t bytes : sizes[i]) {
      targets.push_back(target);
      target += bytes;
    }
    share(request.inputs[i].data, sizes[i], targets);
  }
  return {};
}

void HostTransport::broadcast(Request& request) {
  const bool root = ranks()[rank()] == request.root;
  const int root_rank =
      static_cast<int>(std::find(ranks().begin(), ranks().end(), request.root) - ranks().begin());
  Stream in, out;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const int64_t bytes = static_cast<int64_t>(input.bytes());
    in.add(input.data, bytes);
    out.add(request.outputs[i], bytes);
    if (root && bytes > 0 && request.outputs[i] != input.data)
      std::memcpy(request.outputs[i], input.data, bytes);
  }
  for (int64_t left = in.left(); left > 0; left -= kChunkBytes) {
    const int64_t bytes = std::min(left, kChunkBytes);
    const uint64_t step = memory_.step();
    if (root) in.copy_to(slot(rank(), step), bytes);
    meet();
    if (!root) out.copy_from(slot(root_rank, step), bytes);
  }
}

// Every rank's bytes into the targets of all, by rank.
void HostTransport::share(const void* mine, const std::vector<int64_t>& sizes,
                          const std::vector<char*>& targets) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const char* own = static_cast<const char*>(mine);
  if (sizes[rank()] > 0) std::memcpy(targets[rank()], own, sizes[rank()]);
  for (int64_t start = 0; start < longest; start += kChunkBytes) {
    const auto bytes = [&](int r) { return std::clamp<int64_t>(sizes[r] - start, 0, kChunkBytes); };
    const uint64_t step = memory_.step();
    if (bytes(rank()) > 0) std::memcpy(slot(rank(), step), own + start, bytes(rank()));
    meet();
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && bytes(r) > 0) std::memcpy(targets[r] + start, slot(r, step), bytes(r));
    }
  }
}

// As many from each rank.
std::vector<int64_t> HostTransport::share_numbers(const std::vector<int64_t>& mine) {
  const int64_t bytes = static_cast<int64_t>(mine.size() * sizeof(int64_t));
  std::vector<int64_t> all(mine.size() * size());
  std::vector<char*> targets;
  for (int r = 0; r < size(); ++r)
    targets.push_back(reinterpret_cast<char*>(all.data() + r * mine.size()));
  if (bytes > 0) share(mine.data(), std::vector<int64_t>(size(), bytes), targets);
  return all;
}

}  // namespace hvd
