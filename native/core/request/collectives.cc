#include "core/request/collectives.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <locale>
#include <sstream>

#include "core/base/bytes.h"

namespace hvd {
namespace {

std::string listed(const std::vector<int>& numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

std::string wrong_splits(const Input& tensor, const Input& splits, size_t size) {
  if (splits.dtype != DType::int64 || splits.shape.size() != 1 ||
      splits.shape[0] != static_cast<int64_t>(size)) {
    return "got " + std::to_string(elements(splits.shape)) + " splits, expected " +
           std::to_string(size) + ", one number of rows per rank.";
  }
  const int64_t* rows = static_cast<const int64_t*>(splits.data);
  int64_t total = 0;
  for (size_t r = 0; r < size; ++r) {
    if (rows[r] < 0) return "got a split of " + std::to_string(rows[r]) + " rows.";
    total += rows[r];
  }
  if (total == tensor.shape[0]) return {};
  return "got splits that add up to " + std::to_string(total) + " rows, and a tensor of " +
         std::to_string(tensor.shape[0]) + ". Without splits, the rows must divide by the " +
         std::to_string(size) + " ranks.";
}

// Of a header, for a Writer or a Reader.
template <typename Bytes, typename R>
void fields(Bytes& bytes, R& request) {
  bytes(request.kind, request.process_set, request.name, request.note, request.reduction,
        request.prescale, request.postscale, request.wire, request.root, request.waits);
}

// A shape with -1 for a dimension that may differ by rank.
Shape agreed_shape(const Request& request, const Input& input) {
  Shape shape = input.shape;
  if (collective(request.kind).first_dim_free && !shape.empty()) shape[0] = -1;
  return shape;
}

}  // namespace

const std::vector<Collective>& collectives() {
  constexpr bool yes = true, no = false;
  // kind, name, reduces, has_root, first_dim_free, keeps_shape, joins, needs_all, xla, on_host
  static const auto* all = new std::vector<Collective>{
      {Kind::allreduce, "allreduce", yes, no, no, yes, no, no, yes, {}},
      {Kind::allgather, "allgather", no, no, yes, no, no, no, yes, {}},
      {Kind::broadcast, "broadcast", no, yes, no, yes, no, no, yes, {}},
      {Kind::alltoall, "alltoall", no, no, yes, no, no, yes, yes, {"splits", "received_splits"}},
      {Kind::reducescatter, "reducescatter", yes, no, no, no, no, no, yes, {}},
      {Kind::reduce, "reduce", yes, yes, no, yes, no, no, no, {}},
      {Kind::barrier, "barrier", no, no, no, no, no, no, yes, {}},
      {Kind::join, "join", no, no, no, no, yes, no, no, {"last"}},
  };
  return *all;
}

const Collective& collective(Kind kind) { return collectives()[static_cast<size_t>(kind)]; }

std::string problem(const Request& request, const std::vector<int>& ranks) {
  const Collective& row = collective(request.kind);
  if (row.has_root && std::find(ranks.begin(), ranks.end(), request.root) == ranks.end()) {
    return "root rank " + std::to_string(request.root) + " does not take part. The ranks are " +
           listed(ranks) + ".";
  }
  if (row.reduces && request.wire != DType::float64 &&
      (!row.keeps_shape || request.reduction == Reduction::adasum)) {
    return std::string("got compression=") + name_of(request.wire) +
           " with op=" + name_of(request.reduction) +
           ", which sums tensors as they are. Round them before, or leave compression out.";
  }
  for (const Input& input : request.inputs) {
    if ((row.first_dim_free || (row.reduces && !row.keeps_shape)) && input.shape.empty()) {
      return "got a scalar, expected a tensor with at least one dimension. Use "
             "tf.expand_dims(tensor, 0).";
    }
    if (!row.reduces) continue;
    const std::string got = std::string("got a tensor of dtype ") + name_of(input.dtype);
    const std::string with = got + " with op=" + name_of(request.reduction);
    if (input.dtype == DType::boolean && request.reduction != Reduction::min &&
        request.reduction != Reduction::max) {
      return with + ". Use Min (logical and) or Max (logical or), or cast it.";
    }
    if (is_floating(input.dtype)) continue;
    if (request.reduction == Reduction::average || request.reduction == Reduction::adasum) {
      return with +
             ", whose result would be rounded. Use op=Sum and divide, or cast it to float32.";
    }
    if (request.prescale != 1.0 || request.postscale != 1.0) {
      return got + " and scale factors, whose result would be rounded. Cast it to float32.";
    }
  }
  if (request.kind != Kind::alltoall) return {};
  for (size_t i = 0; i + 1 < request.inputs.size(); i += 2) {
    const std::string wrong = wrong_splits(request.inputs[i], request.inputs[i + 1], ranks.size());
    if (!wrong.empty()) return wrong;
  }
  return {};
}

DType on_the_wire(const Request& request, DType dtype) {
  return is_floating(dtype) && size_of(dtype) > size_of(request.wire) ? request.wire : dtype;
}

std::string identity(const Request& request) {
  return std::string(collective(request.kind).name) + " '" + request.name + "'";
}

Status cannot_run(const Request& request, Code code, const std::string& why) {
  return Status::error(code, identity(request) + " cannot run: " + why);
}

std::string describe(const Request& request) {
  const Collective& row = collective(request.kind);
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(std::numeric_limits<double>::max_digits10);  // different factors, different texts
  if (row.reduces) {
    out << "op=" << name_of(request.reduction) << " ";
    if (request.prescale != 1.0) out << "prescale_factor=" << request.prescale << " ";
    if (request.postscale != 1.0) out << "postscale_factor=" << request.postscale << " ";
    if (request.wire != DType::float64) out << "compression=" << name_of(request.wire) << " ";
  }
  if (row.has_root) out << "root_rank=" << request.root << " ";
  if (!request.note.empty()) out << request.note << " ";
  const char* separator = "";
  for (const Input& input : request.inputs) {
    out << separator << name_of(input.dtype) << "[";
    const char* comma = "";
    for (int64_t dim : agreed_shape(request, input)) {
      out << comma;
      if (dim < 0) {
        out << "*";
      } else {
        out << dim;
      }
      comma = ",";
    }
    out << "]";
    separator = ", ";
  }
  if (request.device != kOnHost) out << ", on a GPU";
  return out.str();
}

uint64_t fingerprint(const Request& request, const std::string& problem) {
  const Collective& row = collective(request.kind);
  Hash hash;
  hash.add(static_cast<uint64_t>(request.kind));
  hash.add(request.name);
  if (row.reduces) {
    hash.add(static_cast<uint64_t>(request.reduction));
    hash.add(request.prescale);
    hash.add(request.postscale);
    hash.add(static_cast<uint64_t>(request.wire));
  }
  if (row.has_root) hash.add(static_cast<uint64_t>(request.root));
  hash.add(request.note);
  hash.add(static_cast<uint64_t>(request.device != kOnHost));
  for (const Input& input : request.inputs) {
    hash.add(static_cast<uint64_t>(input.dtype));
    hash.add(static_cast<uint64_t>(input.shape.size()));
    for (int64_t dim : agreed_shape(request, input)) hash.add(static_cast<uint64_t>(dim));
  }
  if (!problem.empty()) hash.add(problem);
  return hash.value();
}

std::string encode_header(const Request& request) {
  Writer out;
  fields(out, request);
  out(request.device == kOnHost ? kOnHost : kOnSomeDevice, request.inputs);
  return out.take();
}

Request decode_header(const std::string& bytes) {
  Reader in(bytes);
  Request request;
  fields(in, request);
  in(request.device, request.inputs);
  return request;
}

}  // namespace hvd
