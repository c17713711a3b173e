#include "core/layout.h"

#include <map>
#include <string>

#include "core/collectives.h"

namespace hvd {

std::vector<OfOneDType> by_dtype(const Request& request) {
  std::vector<OfOneDType> groups;
  std::map<DType, size_t> places;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const int64_t n = elements(input.shape);
    if (n == 0) continue;
    const DType dtype = on_the_wire(request, input.dtype);
    const auto [place, is_new] = places.emplace(dtype, groups.size());
    if (is_new) groups.push_back({dtype, Stream(dtype), Stream(dtype)});
    groups[place->second].in.add(input.data, input.dtype, n);
    groups[place->second].out.add(request.outputs[i], input.dtype, n);
  }
  return groups;
}

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

Status all_or_none(const Status& mine, const std::vector<int64_t>& failed,
                   const std::vector<int>& ranks, const Request& request) {
  if (!mine.ok()) return mine;
  const auto other = std::find(failed.begin(), failed.end(), 1);
  if (other == failed.end()) return {};
  return Status::error(Code::aborted, "rank " + std::to_string(ranks[other - failed.begin()]) +
                                          " could not allocate the output of " + identity(request));
}

}  // namespace hvd
