#include "core/collectives.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

namespace hvd {
namespace {

struct DTypeRow {
  const char* name;
  size_t size;
};

constexpr DTypeRow kDTypes[] = {
    {"bool", 1},     {"uint8", 1},   {"int8", 1},    {"uint16", 2}, {"int16", 2},
    {"uint32", 4},   {"int32", 4},   {"uint64", 8},  {"int64", 8},  {"float16", 2},
    {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
};

constexpr const char* kReductions[] = {"Average", "Sum", "Min", "Max", "Product"};

//                                  name      reduces  root  free dim  keeps shape
constexpr Collective kCollectives[] = {
    {"allreduce", true, false, false, true},
    {"allgather", false, false, true, false},
    {"broadcast", false, true, false, true},
};

bool is_floating(DType dtype) { return dtype >= DType::float16; }

// FNV-1a (Fowler, Noll, Vo; http://www.isthe.com/chongo/tech/comp/fnv/) over 64-bit words, with a
// final mix.
class Hash {
 public:
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3ULL;
    state_ ^= state_ >> 29;  // FNV alone never carries high bits down
  }
  void add(double value) {
    uint64_t word;
    std::memcpy(&word, &value, sizeof word);
    add(word);
  }
  void add(const std::string& text) {
    add(static_cast<uint64_t>(text.size()));
    for (unsigned char c : text) add(static_cast<uint64_t>(c));
  }
  uint64_t value() const { return state_ < 2 ? state_ + 2 : state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

// What is left of a shape when what may differ by rank is taken away.
Shape agreed_shape(const Request& request, const Input& input) {
  Shape shape = input.shape;
  if (collective(request.kind).first_dim_free && !shape.empty()) shape[0] = -1;
  return shape;
}

}  // namespace

size_t size_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].size; }
const char* name_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }
const char* name_of(Reduction reduction) { return kReductions[static_cast<int>(reduction)]; }
const Collective& collective(Kind kind) { return kCollectives[static_cast<int>(kind)]; }

int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

Status check(const Request& request, int size) {
  const Collective& row = collective(request.kind);
  const auto refuse = [&](const std::string& what) {
    return Status::error(Code::invalid_argument, identity(request) + ": " + what);
  };
  if (row.has_root && (request.root < 0 || request.root >= size)) {
    return refuse("root rank " + std::to_string(request.root) + " does not exist. Ranks are 0 to " +
                  std::to_string(size - 1) + ".");
  }
  for (const Input& input : request.inputs) {
    if (row.first_dim_free && input.shape.empty()) {
      return refuse(
          "got a scalar, expected a tensor with at least one dimension. Use tf.expand_dims(tensor, "
          "0).");
    }
    if (!row.reduces) continue;
    if (input.dtype == DType::boolean && request.reduction != Reduction::min &&
        request.reduction != Reduction::max) {
      return refuse(std::string("got a bool tensor with op=") + name_of(request.reduction) +
                    ". Use Min (logical and) or Max (logical or), or cast it.");
    }
    if (!is_floating(input.dtype) && request.reduction == Reduction::average) {
      return refuse(std::string("got a tensor of dtype ") + name_of(input.dtype) +
                    " with op=Average, which would have to round. Use op=Sum and divide, or cast "
                    "it to float32.");
    }
    if (!is_floating(input.dtype) && (request.prescale != 1.0 || request.postscale != 1.0)) {
      return refuse(std::string("got scale factors for a tensor of dtype ") + name_of(input.dtype) +
                    ", which would have to round. Cast it to float32.");
    }
  }
  return {};
}

std::string identity(const Request& request) {
  return std::string(collective(request.kind).name) + " '" + request.name + "'";
}

std::string describe(const Request& request) {
  const Collective& row = collective(request.kind);
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::max_digits10);  // different factors, different texts
  if (row.reduces) {
    out << "op=" << name_of(request.reduction) << " ";
    if (request.prescale != 1.0) out << "prescale_factor=" << request.prescale << " ";
    if (request.postscale != 1.0) out << "postscale_factor=" << request.postscale << " ";
  }
  if (row.has_root) out << "root_rank=" << request.root << " ";
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
  return out.str();
}

uint64_t fingerprint(const Request& request) {
  const Collective& row = collective(request.kind);
  Hash hash;
  hash.add(static_cast<uint64_t>(request.kind));
  hash.add(request.name);
  if (row.reduces) {
    hash.add(static_cast<uint64_t>(request.reduction));
    hash.add(request.prescale);
    hash.add(request.postscale);
  }
  if (row.has_root) hash.add(static_cast<uint64_t>(request.root));
  for (const Input& input : request.inputs) {
    hash.add(static_cast<uint64_t>(input.dtype));
    hash.add(static_cast<uint64_t>(input.shape.size()));
    for (int64_t dim : agreed_shape(request, input)) hash.add(static_cast<uint64_t>(dim));
  }
  return hash.value();
}

}  // namespace hvd
