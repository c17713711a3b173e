#include "core/math/layout.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/request/collectives.h"

namespace hvd {

Status allocate_gathered(Request& request, const std::vector<int64_t>& rows, int size,
                         std::vector<std::vector<int64_t>>* bytes) {
  const size_t n = request.inputs.size();
  Status status;
  request.outputs.assign(n, nullptr);
  bytes->assign(n, {});
  for (size_t i = 0; i < n; ++i) {
    const Input& input = request.inputs[i];
    Shape shape = input.shape;
    shape[0] = 1;
    const int64_t row_bytes = elements(shape) * static_cast<int64_t>(size_of(input.dtype));
    shape[0] = 0;
    for (int r = 0; r < size; ++r) {
      shape[0] += rows[r * n + i];
      (*bytes)[i].push_back(rows[r * n + i] * row_bytes);
    }
    if (status.ok()) status = request.allocate(i, shape, &request.outputs[i]);
  }
  return status;
}

int64_t first_row(int64_t rows, int rank, int size) {
  return rows / size * rank + std::min<int64_t>(rank, rows % size);
}

Status allocate_scattered(Request& request, int rank, int size) {
  Status status;
  request.outputs.assign(request.inputs.size(), nullptr);
  for (size_t i = 0; i < request.inputs.size() && status.ok(); ++i) {
    Shape shape = request.inputs[i].shape;
    shape[0] = first_row(shape[0], rank + 1, size) - first_row(shape[0], rank, size);
    status = request.allocate(i, shape, &request.outputs[i]);
  }
  return status;
}

Status allocate_exchanged(Request& request, const std::vector<int64_t>& splits, int rank, int size,
                          std::vector<Part>* sent, std::vector<Part>* received) {
  const size_t n = request.inputs.size() / 2;  // tensors, each with its splits
  Status status;
  request.outputs.assign(2 * n, nullptr);
  for (size_t i = 0; i < n && status.ok(); ++i) {
    const auto rows = [&](int from, int to) { return splits[(from * n + i) * size + to]; };
    const Input& input = request.inputs[2 * i];
    Shape shape = input.shape;
    shape[0] = 1;
    const int64_t row_bytes = elements(shape) * static_cast<int64_t>(size_of(input.dtype));
    shape[0] = 0;
    for (int r = 0; r < size; ++r) shape[0] += rows(r, rank);
    status = request.allocate(2 * i, shape, &request.outputs[2 * i]);
    if (status.ok()) status = request.allocate(2 * i + 1, {size}, &request.outputs[2 * i + 1]);
    if (!status.ok()) break;
    char* in = static_cast<char*>(const_cast<void*>(input.data));
    char* out = static_cast<char*>(request.outputs[2 * i]);
    for (int r = 0; r < size; ++r) {
      static_cast<int64_t*>(request.outputs[2 * i + 1])[r] = rows(r, rank);
      sent->push_back({r, in, rows(rank, r) * row_bytes});
      received->push_back({r, out, rows(r, rank) * row_bytes});
      in += sent->back().bytes;
      out += received->back().bytes;
    }
  }
  return status;
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

Status all_or_none(const Status& mine, const std::vector<int64_t>& failed,
                   const std::vector<int>& ranks, const Request& request) {
  if (!mine.ok()) return mine;
  const auto other = std::find(failed.begin(), failed.end(), 1);
  if (other == failed.end()) return {};
  return Status::error(Code::aborted, "rank " + std::to_string(ranks[other - failed.begin()]) +
                                          " could not allocate the output of " + identity(request));
}

}  // namespace hvd
