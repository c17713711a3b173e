#include "core/host_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/collectives.h"
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

class HostTransport::Stream {
 public:
  void add(const void* data, int64_t bytes) {
    if (bytes > 0) pieces_.push_back({static_cast<char*>(const_cast<void*>(data)), bytes});
    left_ += bytes;
  }

  int64_t left() const { return left_; }

  void copy_to(char* target, int64_t bytes) {
    walk(bytes, [&](char* piece, int64_t at, int64_t n) { std::memcpy(target + at, piece, n); });
  }

  void copy_from(const char* source, int64_t bytes) {
    walk(bytes, [&](char* piece, int64_t at, int64_t n) { std::memcpy(piece, source + at, n); });
  }

 private:
  struct Piece {
    char* data;
    int64_t bytes;
  };

  template <typename Copy>
  void walk(int64_t bytes, const Copy& copy) {
    left_ -= bytes;
    for (int64_t done = 0; done < bytes;) {
      const Piece& piece = pieces_[piece_];
      const int64_t n = std::min(piece.bytes - offset_, bytes - done);
      copy(piece.data + offset_, done, n);
      done += n;
      offset_ += n;
      if (offset_ == piece.bytes) {
        ++piece_;
        offset_ = 0;
      }
    }
  }

  std::vector<Piece> pieces_;
  int64_t left_ = 0;
  size_t piece_ = 0;
  int64_t offset_ = 0;  // in the piece
};

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

void HostTransport::allreduce(Request& request) {
  std::vector<bool> taken(request.inputs.size(), false);
  for (size_t first = 0; first < request.inputs.size(); ++first) {
    if (taken[first]) continue;
    const DType dtype = request.inputs[first].dtype;
    Stream in, out;
    for (size_t i = first; i < request.inputs.size(); ++i) {
      const Input& input = request.inputs[i];
      if (input.dtype != dtype) continue;
      taken[i] = true;
      in.add(input.data, static_cast<int64_t>(input.bytes()));
      out.add(request.outputs[i], static_cast<int64_t>(input.bytes()));
    }
    if (in.left() > 0) reduce_stream(request, dtype, in, out);
  }
}

void HostTransport::reduce_stream(const Request& request, DType dtype, Stream in, Stream out) {
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
  const size_t n = request.inputs.size();
  std::vector<int64_t> my_rows;
  for (const Input& input : request.inputs) my_rows.push_back(input.shape[0]);
  const std::vector<int64_t> rows = share_numbers(my_rows);

  Status status;
  request.outputs.assign(n, nullptr);
  std::vector<std::vector<int64_t>> sizes(n);
  for (size_t i = 0; i < n; ++i) {
    const Input& input = request.inputs[i];
    Shape shape = input.shape;
    shape[0] = 1;
    const int64_t row_bytes = elements(shape) * static_cast<int64_t>(size_of(input.dtype));
    shape[0] = 0;
    for (int r = 0; r < size(); ++r) {
      shape[0] += rows[r * n + i];
      sizes[i].push_back(rows[r * n + i] * row_bytes);
    }
    if (status.ok()) status = request.allocate(i, shape, &request.outputs[i]);
  }
  // One rank without memory must not leave the others waiting for its bytes.
  status = all_or_none(status, share_numbers({status.ok() ? 0 : 1}), ranks(), request);
  if (!status.ok()) return status;
  for (size_t i = 0; i < n; ++i) {
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
