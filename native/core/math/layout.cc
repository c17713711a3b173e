#include "core/math/layout.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/request/collectives.h"

namespace hvd {
namespace {

int64_t row_bytes(const Input& input) {
  Shape row = input.shape;
  row[0] = 1;
  return elements(row) * size_of(input.dtype);
}

// `rows`: the inputs' first dimensions, rank by rank.
Status lay_out_gathered(Request& request, const std::vector<int64_t>& rows, int size,
                        Layout* layout) {
  const size_t n = request.inputs.size();
  Status status;
  for (size_t i = 0; i < n; ++i) {
    const int64_t row = row_bytes(request.inputs[i]);
    std::vector<int64_t>& bytes = layout->gathered.emplace_back();
    Shape shape = request.inputs[i].shape;
    shape[0] = 0;
    for (int r = 0; r < size; ++r) {
      shape[0] += rows[r * n + i];
      bytes.push_back(rows[r * n + i] * row);
    }
    if (status.ok()) status = request.allocate(i, shape, &request.outputs[i]);
  }
  return status;
}

Status lay_out_scattered(Request& request, int rank, int size) {
  Status status;
  for (size_t i = 0; i < request.inputs.size() && status.ok(); ++i) {
    Shape shape = request.inputs[i].shape;
    shape[0] = first_row(shape[0], rank + 1, size) - first_row(shape[0], rank, size);
    status = request.allocate(i, shape, &request.outputs[i]);
  }
  return status;
}

// `sent` and `received`: rows, by rank and tensor.
Status lay_out_exchanged(Request& request, const std::vector<int64_t>& sent,
                         const std::vector<int64_t>& received, int size, Layout* layout) {
  const size_t n = request.inputs.size() / 2;  // tensors, each with its splits
  Status status;
  for (size_t i = 0; i < n && status.ok(); ++i) {
    const Input& input = request.inputs[2 * i];
    const int64_t row = row_bytes(input);
    Shape shape = input.shape;
    shape[0] = 0;
    for (int r = 0; r < size; ++r) shape[0] += received[r * n + i];
    status = request.allocate(2 * i, shape, &request.outputs[2 * i]);
    if (status.ok()) status = request.allocate(2 * i + 1, {size}, &request.outputs[2 * i + 1]);
    if (!status.ok()) break;
    char* in = static_cast<char*>(const_cast<void*>(input.data));
    char* out = static_cast<char*>(request.outputs[2 * i]);
    for (int r = 0; r < size; ++r) {
      static_cast<int64_t*>(request.outputs[2 * i + 1])[r] = received[r * n + i];
      layout->sent.push_back({r, in, sent[r * n + i] * row});
      layout->received.push_back({r, out, received[r * n + i] * row});
      in += layout->sent.back().bytes;
      out += layout->received.back().bytes;
    }
  }
  return status;
}

}  // namespace

int64_t first_row(int64_t rows, int rank, int size) {
  return rows / size * rank + std::min<int64_t>(rank, rows % size);
}

std::vector<int64_t> scattered(const Input& input, int size) {
  std::vector<int64_t> begin;
  const int64_t row = row_bytes(input);
  for (int r = 0; r <= size; ++r) begin.push_back(first_row(input.shape[0], r, size) * row);
  return begin;
}

Status lay_out(Request& request, Transport& transport, const Waiting& waiting, Layout* layout) {
  const int size = transport.size();
  std::vector<int64_t> mine;
  for (const Input& input : request.inputs)
    if (request.kind == Kind::allgather) mine.push_back(input.shape[0]);
  for (int r = 0; request.kind == Kind::alltoall && r < size; ++r) {
    for (size_t i = 1; i < request.inputs.size(); i += 2)
      mine.push_back(static_cast<const int64_t*>(request.inputs[i].data)[r]);
  }
  request.outputs.assign(request.inputs.size(), nullptr);
  Status status;
  if (request.kind == Kind::allgather) {
    status = lay_out_gathered(request, transport.gather_numbers(mine, waiting), size, layout);
  } else if (request.kind == Kind::alltoall) {
    status =
        lay_out_exchanged(request, mine, transport.exchange_numbers(mine, waiting), size, layout);
  } else {
    status = lay_out_scattered(request, transport.rank(), size);
  }
  Proposal failed;
  if (!status.ok()) failed.fingerprint = size - transport.rank();
  const Summary all = *transport.agree(failed, nullptr, waiting);
  if (!status.ok() || all.most == 0) return status;
  return Status::error(Code::aborted, "rank " + std::to_string(transport.ranks()[size - all.most]) +
                                          " could not allocate the output of " + identity(request));
}

void copy_own(const std::vector<Part>& sent, const std::vector<Part>& received, int rank) {
  auto target = received.begin();
  for (const Part& part : sent) {
    if (part.rank != rank) continue;
    target = std::find_if(target, received.end(), [&](const Part& p) { return p.rank == rank; });
    if (part.bytes > 0) std::memcpy(target->data, part.data, part.bytes);
    ++target;
  }
}

}  // namespace hvd
