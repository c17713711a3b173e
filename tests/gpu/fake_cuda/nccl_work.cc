#include "nccl_work.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

namespace fake_cuda {
namespace {

// What all ranks of a communicator must enqueue alike.
std::string describe(const Op& op) {
  if (op.call == Call::send || op.call == Call::receive) return "";
  static const char* names[] = {"AllReduce", "Reduce", "ReduceScatter", "Broadcast", "AllGather"};
  char text[200];
  std::snprintf(text, sizeof text, "%s of %lld bytes of %s, reduction %d × %.17g, root %d; ",
                names[static_cast<int>(op.call)], static_cast<long long>(op.bytes),
                hvd::name_of(op.dtype), static_cast<int>(op.reduction), op.factor, op.other);
  return text;
}

// A line with the order, then the operations.
void compare(const Comm& comm, const std::vector<Op>& ops, const Order& before) {
  std::string mine;
  for (const auto& [name, groups] : before) mine += name + " " + std::to_string(groups) + " ";
  mine += "\n";
  std::string operations;
  for (const Op& op : ops) operations += describe(op);
  mine += std::to_string(std::hash<std::string>()(operations)) + " " + operations;
  std::snprintf(comm.wire->text(comm.rank), Wire::kTextBytes, "%s", mine.c_str());
  comm.wire->barrier();
  mine = comm.wire->text(comm.rank);
  const auto of_rank = [](int rank) { return "Rank " + std::to_string(rank) + ": "; };
  for (int r = 0; r < comm.size; ++r) {
    const std::string other = comm.wire->text(r);
    if (other.substr(other.find('\n')) != mine.substr(mine.find('\n'))) {
      violation("ranks enqueue different collectives. " + of_rank(comm.rank) + mine + ". " +
                of_rank(r) + other);
    }
    std::istringstream line(other.substr(0, other.find('\n')));
    std::string name;
    for (int64_t groups; line >> name >> groups;) {
      const auto own = before.find(name);
      if (name == comm.name || own == before.end() || own->second == groups) continue;
      violation("ranks enqueue the collectives of two communicators in different orders: rank " +
                std::to_string(comm.rank) + " has enqueued " + std::to_string(own->second) +
                " of the other one before, rank " + std::to_string(r) + " " +
                std::to_string(groups));
    }
  }
  comm.wire->barrier();
}

// `root` < 0: to all.
void reduce(const Comm& comm, const Op& op, const char* in, char* out, int root) {
  const int64_t width = hvd::size_of(op.dtype);
  std::vector<const void*> sources;
  for (int r = 0; r < comm.size; ++r) sources.push_back(comm.wire->slot(r));
  for (int64_t start = 0; start < op.bytes; start += Wire::kSlotBytes) {
    const int64_t bytes = std::min(Wire::kSlotBytes, op.bytes - start);
    std::memcpy(comm.wire->slot(comm.rank), in + start, bytes);
    comm.wire->barrier();
    if (root < 0 || root == comm.rank) {
      const double divisor = op.reduction == hvd::Reduction::average ? comm.size : 1.0;
      hvd::loops().reduce(op.dtype, op.reduction, {op.factor, divisor, 1}, sources.data(),
                          comm.size, bytes / width, out + start);
    }
    comm.wire->barrier();
  }
}

void broadcast(const Comm& comm, const Op& op, const char* in, char* out, int root) {
  for (int64_t start = 0; start < op.bytes; start += Wire::kSlotBytes) {
    const int64_t bytes = std::min(Wire::kSlotBytes, op.bytes - start);
    if (root == comm.rank) std::memcpy(comm.wire->slot(root), in + start, bytes);
    comm.wire->barrier();
    std::memcpy(out + start, comm.wire->slot(root), bytes);
    comm.wire->barrier();
  }
}

// All sends and receives of a group, at once.
void exchange(const Comm& comm, const std::vector<Op>& ops) {
  std::vector<std::string> to(comm.size), from(comm.size);
  for (const Op& op : ops) {
    if (op.call == Call::send) to[op.other].append(op.in, op.bytes);
    if (op.call == Call::receive) from[op.other].append(op.bytes, '\0');
  }
  const size_t size = comm.size;
  int64_t* mine = reinterpret_cast<int64_t*>(comm.wire->slot(comm.rank));
  for (size_t r = 0; r < size; ++r) {
    mine[r] = static_cast<int64_t>(to[r].size());
    mine[size + r] = static_cast<int64_t>(from[r].size());
  }
  comm.wire->barrier();
  const auto count_of = [&](size_t rank, size_t at) {
    return reinterpret_cast<int64_t*>(comm.wire->slot(static_cast<int>(rank)))[at];
  };
  int64_t longest = 0;
  for (size_t a = 0; a < size; ++a) {
    for (size_t b = 0; b < size; ++b) {
      if (count_of(a, b) != count_of(b, size + a)) {
        violation("rank " + std::to_string(a) + " sends " + std::to_string(count_of(a, b)) +
                  " bytes to rank " + std::to_string(b) + ", which expects " +
                  std::to_string(count_of(b, size + a)));
      }
      longest = std::max(longest, count_of(a, b));
    }
  }
  comm.wire->barrier();
  const int64_t part = Wire::kSlotBytes / comm.size;
  const auto piece = [&](const std::string& all, int64_t start) {
    return std::clamp<int64_t>(static_cast<int64_t>(all.size()) - start, 0, part);
  };
  for (int64_t start = 0; start < longest; start += part) {
    for (int r = 0; r < comm.size; ++r) {
      const int64_t n = piece(to[r], start);
      if (n > 0) std::memcpy(comm.wire->slot(comm.rank) + r * part, to[r].data() + start, n);
    }
    comm.wire->barrier();
    for (int r = 0; r < comm.size; ++r) {
      const int64_t n = piece(from[r], start);
      if (n > 0) std::memcpy(from[r].data() + start, comm.wire->slot(r) + comm.rank * part, n);
    }
    comm.wire->barrier();
  }
  std::vector<int64_t> taken(comm.size, 0);
  for (const Op& op : ops) {
    if (op.call != Call::receive) continue;
    std::memcpy(op.out, from[op.other].data() + taken[op.other], op.bytes);
    taken[op.other] += op.bytes;
  }
}

}  // namespace

void run(const Comm& comm, const std::vector<Op>& ops, const Order& before) {
  compare(comm, ops, before);
  for (const Op& op : ops) {
    if (op.call == Call::all_reduce) reduce(comm, op, op.in, op.out, -1);
    if (op.call == Call::reduce) reduce(comm, op, op.in, op.out, op.other);
    if (op.call == Call::broadcast) broadcast(comm, op, op.in, op.out, op.other);
    for (int r = 0; r < comm.size && op.call == Call::reduce_scatter; ++r)
      reduce(comm, op, op.in + r * op.bytes, op.out, r);
    for (int r = 0; r < comm.size && op.call == Call::all_gather; ++r)
      broadcast(comm, op, op.in, op.out + r * op.bytes, r);
  }
  exchange(comm, ops);
}

}  // namespace fake_cuda
