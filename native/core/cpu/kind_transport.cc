#include "core/cpu/kind_transport.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/base/log.h"

namespace hvd {

std::vector<std::string> KindTransport::gather(const std::string& mine, const Waiting& waiting) {
  begin(waiting);
  const auto sizes = share_numbers<int64_t>({static_cast<int64_t>(mine.size())});
  std::string all(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), '\0');
  gather_bytes(mine.data(), sizes, all.data());
  std::vector<std::string> parts;
  size_t offset = 0;
  for (int64_t size : sizes) {
    parts.push_back(all.substr(offset, size));
    offset += size;
  }
  return parts;
}

Status KindTransport::run(Request& request, const Waiting& waiting) {
  begin(waiting);
  switch (request.kind) {
    case Kind::reduce:
    case Kind::allreduce:
      if (request.reduction == Reduction::adasum) {
        adasum(request);
      } else {
        allreduce(request);
      }
      return {};
    case Kind::broadcast:
      broadcast(request);
      return {};
    case Kind::barrier:
      return {};  // all ranks have agreed to run it, so all have arrived
    case Kind::join: {
      void* last = nullptr;
      const Status status = request.allocate(0, {}, &last);
      // The engine has stored the last rank to join as the root.
      if (status.ok()) *static_cast<int32_t*>(last) = request.root;
      return status;
    }
    case Kind::allgather:
    case Kind::alltoall:
    case Kind::reducescatter:
      break;
  }
  Layout layout;
  const Status status = lay_out(request, *this, waiting, &layout);
  if (!status.ok()) return status;
  if (request.kind == Kind::alltoall) {
    exchange(layout.sent, layout.received);
    return {};
  }
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    if (request.kind == Kind::allgather) {
      gather_bytes(request.inputs[i].data, layout.gathered[i], request.outputs[i]);
    } else {
      reducescatter(request, i);
    }
  }
  return {};
}

std::pair<ByteCursor, ByteCursor> KindTransport::broadcast_tensors(const Request& request) const {
  ByteCursor in, out;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const auto bytes = static_cast<int64_t>(input.bytes());
    in.add(input.data, bytes);
    out.add(request.outputs[i], bytes);
    if (rank() == number_in_set(request.root) && bytes > 0 && request.outputs[i] != input.data)
      std::memcpy(request.outputs[i], input.data, bytes);
  }
  return {std::move(in), std::move(out)};
}

std::optional<DTypeGroup> KindTransport::small_group(const Request& request, int64_t most) {
  if (!adds_up(request.kind) || request.reduction == Reduction::adasum ||
      request.device != kOnHost || static_cast<int64_t>(input_bytes(request)) > most)
    return {};
  std::vector<DTypeGroup> groups = by_dtype(request);
  if (groups.size() != 1 || groups[0].in.left() > most) return {};
  return std::move(groups[0]);
}

void KindTransport::make_room(SharedMemory& memory, int64_t bytes, int64_t whole,
                              int64_t* committed) {
  if (bytes <= *committed || asked_for_room_) return;
  asked_for_room_ = true;
  Proposal failed;
  failed.fingerprint = memory.commit() ? 0 : 1;
  if (agree(failed, nullptr, waiting_)->most == 0) {
    *committed = whole;
  } else if (rank() == 0) {
    log(LogLevel::warning,
        "/dev/shm is full on a host, so tensors travel in pieces of " + std::to_string(*committed) +
            " bytes, which is slower. Make it larger; containers need --shm-size or --ipc=host.");
  }
}

}  // namespace hvd
