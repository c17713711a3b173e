#include "core/mpi_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/reduce.h"

namespace hvd {
namespace {

// Measured with Open MPI 5: calls of 4 MiB move several times as many bytes a second as calls of 64
// MiB.
constexpr int64_t kChunkBytes = 4 << 20;

// Below this, one Allgather of everything beats the two calls of the sliced way, although it moves
// more.
constexpr int64_t kSmallBytes = 16 << 10;

// MPI counts are ints; larger transfers are cut.
constexpr int64_t kMaxCount = 1 << 30;

// How a wait turns from spinning to sleeping: a rank that is as fast as the others never sleeps,
// one that waits for long costs next to nothing and wakes up late by a small part of what it has
// waited.
constexpr double kSpinSeconds = 200e-6;
constexpr double kMaxSleepSeconds = 1e-3;

void wait_politely(MPI_Request* request, const std::function<void(double)>& waiting) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    int done = 0;
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (done) return;
    const double waited =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (waited < kSpinSeconds) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(
        std::chrono::duration<double>(std::min(waited / 10, kMaxSleepSeconds)));
    if (waiting) waiting(waited);
  }
}

}  // namespace

// One tensor's memory, seen as part of the concatenation of all tensors of its dtype.
struct MpiTransport::Span {
  const char* in;
  char* out;
  int64_t bytes;
};

MpiTransport::MpiTransport(MPI_Comm communicator) {
  MPI_Comm_dup(communicator, &communicator_);
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &size_);
}

MpiTransport::~MpiTransport() { MPI_Comm_free(&communicator_); }

bool MpiTransport::agree(uint64_t value, const std::function<void(double)>& waiting) {
  if (size_ == 1) return true;
  // All equal if and only if the least value and the greatest (the complement of the complements'
  // least) are.
  uint64_t mine[2] = {value, ~value};
  uint64_t least[2];
  MPI_Request request;
  MPI_Iallreduce(mine, least, 2, MPI_UINT64_T, MPI_MIN, communicator_, &request);
  wait_politely(&request, waiting);
  return least[0] == ~least[1];
}

std::vector<std::string> MpiTransport::gather(const std::string& mine) {
  const int64_t my_size = static_cast<int64_t>(mine.size());
  std::vector<int64_t> sizes(size_);
  // The others may come late: a rank that found nothing to do looks again only after a pause.
  MPI_Request request;
  MPI_Iallgather(&my_size, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, communicator_, &request);
  wait_politely(&request, nullptr);
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  std::string all(total, '\0');
  gather_bytes(mine.data(), sizes, all.data());
  std::vector<std::string> parts;
  int64_t offset = 0;
  for (int64_t size : sizes) {
    parts.push_back(all.substr(offset, size));
    offset += size;
  }
  return parts;
}

Status MpiTransport::run(Request& request) {
  switch (request.kind) {
    case Kind::allreduce:
      allreduce(request);
      return {};
    case Kind::allgather:
      return allgather(request);
    case Kind::broadcast:
      broadcast(request);
      return {};
  }
  return Status::error(Code::unimplemented, "the MPI transport does not have this collective");
}

void MpiTransport::allreduce(Request& request) {
  std::vector<bool> taken(request.inputs.size(), false);
  for (size_t first = 0; first < request.inputs.size(); ++first) {
    if (taken[first]) continue;
    const DType dtype = request.inputs[first].dtype;
    std::vector<Span> spans;
    for (size_t i = first; i < request.inputs.size(); ++i) {
      const Input& input = request.inputs[i];
      if (input.dtype != dtype) continue;
      taken[i] = true;
      spans.push_back({static_cast<const char*>(input.data), static_cast<char*>(request.outputs[i]),
                       static_cast<int64_t>(input.bytes())});
    }
    allreduce_spans(request, dtype, spans);
  }
}

void MpiTransport::allreduce_spans(const Request& request, DType dtype,
                                   const std::vector<Span>& spans) {
  int64_t total = 0;
  for (const Span& span : spans) total += span.bytes;
  chunk_.resize(std::min(total, kChunkBytes));

  // Two cursors walk over the spans: one packs a chunk, the other unpacks it after the exchange.
  struct Cursor {
    size_t span = 0;
    int64_t offset = 0;
  } pack, unpack;
  const auto walk = [&](Cursor& cursor, int64_t bytes, const auto& copy) {
    for (int64_t done = 0; done < bytes;) {
      const Span& span = spans[cursor.span];
      const int64_t n = std::min(span.bytes - cursor.offset, bytes - done);
      if (n > 0) copy(span, cursor.offset, done, n);
      done += n;
      cursor.offset += n;
      if (cursor.offset == span.bytes) cursor = {cursor.span + 1, 0};
    }
  };
  for (int64_t start = 0; start < total; start += kChunkBytes) {
    const int64_t bytes = std::min(kChunkBytes, total - start);
    walk(pack, bytes, [&](const Span& span, int64_t offset, int64_t at, int64_t n) {
      std::memcpy(chunk_.data() + at, span.in + offset, n);
    });
    reduce_chunk(request, dtype, bytes / static_cast<int64_t>(size_of(dtype)));
    walk(unpack, bytes, [&](const Span& span, int64_t offset, int64_t at, int64_t n) {
      std::memcpy(span.out + offset, chunk_.data() + at, n);
    });
  }
}

void MpiTransport::reduce_chunk(const Request& request, DType dtype, int64_t elements) {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  const auto combine = [&](int64_t stride, int64_t count, char* out) {
    std::vector<const void*> sources(size_);
    for (int r = 0; r < size_; ++r) sources[r] = received_.data() + r * stride;
    reduce(dtype, request.reduction, request.prescale, request.postscale, sources.data(), size_,
           count, out);
  };
  const int64_t bytes = elements * width;
  if (bytes <= kSmallBytes || size_ == 1) {
    received_.resize(bytes * size_);
    MPI_Allgather(chunk_.data(), static_cast<int>(bytes), MPI_BYTE, received_.data(),
                  static_cast<int>(bytes), MPI_BYTE, communicator_);
    combine(bytes, elements, chunk_.data());
    return;
  }
  // Slice j is [bounds(j), bounds(j + 1)).
  const auto bound = [&](int j) { return elements * j / size_ * width; };
  std::vector<int> counts(size_), offsets(size_), my_counts(size_), my_offsets(size_);
  const int64_t mine = bound(rank_ + 1) - bound(rank_);
  for (int j = 0; j < size_; ++j) {
    offsets[j] = static_cast<int>(bound(j));
    counts[j] = static_cast<int>(bound(j + 1) - bound(j));
    my_counts[j] = static_cast<int>(mine);
    my_offsets[j] = static_cast<int>(j * mine);
  }
  received_.resize(mine * size_);
  MPI_Alltoallv(chunk_.data(), counts.data(), offsets.data(), MPI_BYTE, received_.data(),
                my_counts.data(), my_offsets.data(), MPI_BYTE, communicator_);
  combine(mine, mine / width, chunk_.data() + offsets[rank_]);
  MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, chunk_.data(), counts.data(), offsets.data(),
                 MPI_BYTE, communicator_);
}

Status MpiTransport::allgather(Request& request) {
  const size_t n = request.inputs.size();
  std::vector<int64_t> my_rows(n), rows(n * size_);
  for (size_t i = 0; i < n; ++i) my_rows[i] = request.inputs[i].shape[0];
  MPI_Allgather(my_rows.data(), static_cast<int>(n), MPI_INT64_T, rows.data(), static_cast<int>(n),
                MPI_INT64_T, communicator_);

  Status status;
  request.outputs.assign(n, nullptr);
  std::vector<std::vector<int64_t>> sizes(n);
  for (size_t i = 0; i < n; ++i) {
    const Input& input = request.inputs[i];
    Shape shape = input.shape;
    shape[0] = 1;
    const int64_t row_bytes = elements(shape) * static_cast<int64_t>(size_of(input.dtype));
    shape[0] = 0;
    for (int r = 0; r < size_; ++r) {
      shape[0] += rows[r * n + i];
      sizes[i].push_back(rows[r * n + i] * row_bytes);
    }
    if (status.ok()) status = request.allocate(i, shape, &request.outputs[i]);
  }
  // One rank without memory must not leave the others waiting for its bytes.
  int failed = status.ok() ? 0 : 1;
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, communicator_);
  if (failed) {
    if (!status.ok()) return status;
    return Status::error(
        Code::aborted,
        "another rank could not allocate the output of allgather '" + request.name + "'");
  }
  for (size_t i = 0; i < n; ++i) gather_bytes(request.inputs[i].data, sizes[i], request.outputs[i]);
  return {};
}

void MpiTransport::gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) {
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  if (total <= kMaxCount) {
    std::vector<int> counts(sizes.begin(), sizes.end()), offsets(size_, 0);
    for (int r = 1; r < size_; ++r) offsets[r] = offsets[r - 1] + counts[r - 1];
    MPI_Allgatherv(mine, counts[rank_], MPI_BYTE, all, counts.data(), offsets.data(), MPI_BYTE,
                   communicator_);
    return;
  }
  char* part = static_cast<char*>(all);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ && sizes[r] > 0) std::memcpy(part, mine, sizes[r]);
    for (int64_t start = 0; start < sizes[r]; start += kMaxCount) {
      MPI_Bcast(part + start, static_cast<int>(std::min(kMaxCount, sizes[r] - start)), MPI_BYTE, r,
                communicator_);
    }
    part += sizes[r];
  }
}

void MpiTransport::broadcast(Request& request) {
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    char* out = static_cast<char*>(request.outputs[i]);
    const int64_t bytes = static_cast<int64_t>(input.bytes());
    if (rank_ == request.root && out != input.data && bytes > 0)
      std::memcpy(out, input.data, bytes);
    for (int64_t start = 0; start < bytes; start += kMaxCount) {
      MPI_Bcast(out + start, static_cast<int>(std::min(kMaxCount, bytes - start)), MPI_BYTE,
                request.root, communicator_);
    }
  }
}

}  // namespace hvd
