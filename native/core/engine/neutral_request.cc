#include "core/engine/neutral_request.h"

#include <deque>
#include <memory>
#include <vector>

#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {

Request neutral_request(const std::string& header) {
  Request request = decode_header(header);
  const Collective& row = collective(request.kind);
  const auto buffers = std::make_shared<std::deque<std::vector<char>>>();
  for (Input& input : request.inputs) {
    if (row.first_dim_free) input.shape[0] = 0;
    std::vector<char>& buffer = buffers->emplace_back(input.bytes());
    input.data = buffer.data();
    if (row.reduces)
      loops().fill_neutral(input.dtype, request.reduction, elements(input.shape), buffer.data());
    if (row.keeps_shape) request.outputs.push_back(buffer.data());
  }
  request.allocate = [buffers, inputs = request.inputs](size_t index, const Shape& shape,
                                                        void** data) {
    const size_t bytes = static_cast<size_t>(elements(shape)) * size_of(inputs[index].dtype);
    *data = buffers->emplace_back(bytes).data();
    return Status();
  };
  request.done = [buffers](const Status&) {};
  return request;
}

}  // namespace hvd
