// MPI's operations of many ranks: each one's contribution travels to each other, which ends as soon
// as it has all that it needs.
#include <cstring>
#include <utility>

#include "tests/simulate/mpi_state.h"
#include "tests/simulate/network.h"

namespace hvd::sim {
namespace {

using std::string;
using std::to_string;
using std::vector;

// More ranks' operations end on all at once: what is counted then is not who waits for whom.
constexpr int kManyRanks = 16;

// One of MPI's collective operations.
struct Operation {
  string kind;
  int root = -1;
  MPI_Datatype type = 0;
  MPI_Op op = 0;
  vector<int> counts = {};         // of what each rank sends; empty: equally many
  int64_t bytes = 0;               // of what the first rank to begin sends
  vector<vector<char>> sent = {};  // by rank of the communicator
  vector<MPI_Request> requests = {};
  vector<int> arrived = {};  // contributions
  vector<char> result = {};  // of all, if it has no root
  int begun = 0, over = 0;
};

struct State {
  std::deque<Communicator> communicators;
  std::map<std::pair<const Communicator*, uint64_t>, Operation> operations;
  vector<MPI_User_function*> functions;
  vector<int> type_bytes;
  std::map<int, Traffic> traffic;  // by rank
};

State& state() { return simulation->wide.of<State>(); }

void combine(const Operation& of, const char* in, char* inout, int64_t bytes) {
  int elements = static_cast<int>(bytes / bytes_of(of.type));
  MPI_Datatype type = of.type;
  if (of.op >= 100)
    return state().functions[of.op - 100](const_cast<char*>(in), inout, &elements, &type);
  for (int i = 0; i < elements; ++i) {
    if (of.op == MPI_BOR) {
      inout[i] = static_cast<char>(inout[i] | in[i]);
    } else if (of.type == MPI_DOUBLE) {
      auto* const a = reinterpret_cast<double*>(inout) + i;
      *a = std::min(*a, reinterpret_cast<const double*>(in)[i]);
    } else {
      auto* const a = reinterpret_cast<int*>(inout) + i;
      const int b = reinterpret_cast<const int*>(in)[i];
      *a = of.op == MPI_MAX ? std::max(*a, b) : std::min(*a, b);
    }
  }
}

// What all ranks get of an allreduce or allgather.
vector<char> of_all(const Operation& operation) {
  vector<char> result = operation.sent[0];
  for (size_t r = 1; r < operation.sent.size(); ++r) {
    const vector<char>& more = operation.sent[r];
    if (operation.kind == "allreduce")
      combine(operation, more.data(), result.data(), static_cast<int64_t>(result.size()));
    else
      result.insert(result.end(), more.begin(), more.end());
  }
  return result;
}

// All that rank r of the communicator needs has come.
void finish(Communicator& comm, uint64_t number, int r) {
  Operation& operation = state().operations[{&comm, number}];
  const MPI_Request request = operation.requests[r];
  if (operation.kind == "alltoall") {
    const int64_t each = request->bytes;
    for (int other = 0; other < comm.size(); ++other)
      std::copy_n(operation.sent[other].data() + r * each, each, request->data + other * each);
  } else {
    const bool has_root = operation.root >= 0;
    if (!has_root && operation.over == 0) operation.result = of_all(operation);
    const vector<char>& result = has_root ? operation.sent[operation.root] : operation.result;
    if (r != operation.root) std::copy(result.begin(), result.end(), request->data);
  }
  request->done = true;
  if (++operation.over == comm.size()) state().operations.erase({&comm, number});
}

int start(MPI_Comm c, Operation begun, const void* in, int64_t bytes, MPI_Request request) {
  const int code = enter();
  Communicator& comm = communicators()[c];
  const int rank = comm.rank(), size = comm.size();
  const uint64_t number = comm.calls[rank]++;
  Operation& operation = state().operations[{&comm, number}];
  if (operation.sent.empty()) {
    operation = std::move(begun);
    operation.sent.resize(size);
    operation.requests.resize(size);
    operation.arrived.resize(size);
    operation.bytes = bytes;
  } else if (operation.kind != begun.kind || operation.root != begun.root) {
    simulation->violate(begun.kind + " where another rank calls " + operation.kind);
  } else if (operation.counts != begun.counts ||
             (begun.counts.empty() && operation.bytes != bytes)) {
    simulation->violate(begun.kind + " of different sizes");
  }
  const char* const data = static_cast<const char*>(in == MPI_IN_PLACE ? request->data : in);
  operation.sent[rank].assign(data, data + bytes);
  operation.requests[rank] = request;
  ++operation.begun;
  // As Open MPI's nonblocking ones do: MPI_Iallgatherv sends to each other rank by itself.
  int steps = 0;
  while ((1 << steps) < size) ++steps;
  if (!operation.counts.empty()) {
    count(size - 1, bytes * (size - 1));
  } else {
    const bool gathers = operation.kind == "allgather";
    count(steps, gathers                        ? bytes * size
                 : operation.kind == "alltoall" ? bytes / 2 * steps
                                                : bytes * steps);
  }
  if (size > kManyRanks) {
    if (operation.begun < size) return code;
    simulation->at(simulation->now + kMillisecond, [&comm, number, size] {
      for (int r = 0; r < size; ++r) {
        finish(comm, number, r);
        simulation->notify(simulation->processes[comm.ranks[r]]);
      }
    });
    return code;
  }
  const int needed = operation.root < 0 ? size : 1;
  const auto arrived = [&comm, number, needed](int at) {
    Operation& all = state().operations[{&comm, number}];
    if (all.requests[at] && all.arrived[at] == needed) finish(comm, number, at);
  };
  for (int other = 0; other < size; ++other) {
    if (other == rank || (operation.root >= 0 && operation.root != rank)) continue;
    deliver(comm.ranks[rank], comm.ranks[other], [&comm, number, other, arrived] {
      ++state().operations[{&comm, number}].arrived[other];
      arrived(other);
    });
  }
  if (operation.root < 0 || operation.root == rank) ++operation.arrived[rank];
  arrived(rank);
  return code;
}

}  // namespace

std::deque<Communicator>& communicators() { return state().communicators; }

int64_t bytes_of(MPI_Datatype type) {
  return type >= 1000 ? state().type_bytes[type - 1000] : type % 256;
}

void count(uint64_t messages, uint64_t bytes) {
  Traffic& own = state().traffic[simulation->process().rank];
  own.messages += messages;
  own.bytes += bytes;
}

Traffic& traffic(int rank) { return state().traffic[rank]; }

}  // namespace hvd::sim

using namespace hvd::sim;

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  *rank = communicators()[comm].rank();
  return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm comm, int* size) {
  *size = communicators()[comm].size();
  return MPI_SUCCESS;
}

int MPI_Comm_split(MPI_Comm c, int color, int key, MPI_Comm* part) {
  Communicator& comm = communicators()[c];
  const int mine[2] = {color, key};
  vector<int> all(2 * comm.size());
  const uint64_t number = comm.calls[comm.rank()];
  MPI_Allgather(mine, 2, MPI_INT, all.data(), 2, MPI_INT, c);
  *part = MPI_COMM_NULL;
  if (color == MPI_UNDEFINED) return MPI_SUCCESS;
  const auto made = comm.parts.emplace(to_string(number) + " " + to_string(color),
                                       static_cast<int>(communicators().size()));
  *part = made.first->second;
  if (!made.second) return MPI_SUCCESS;
  vector<std::pair<int, int>> members;
  for (int r = 0; r < comm.size(); ++r)
    if (all[2 * r] == color) members.emplace_back(all[2 * r + 1], comm.ranks[r]);
  std::sort(members.begin(), members.end());
  vector<int> ranks;
  for (const auto& member : members) ranks.push_back(member.second);
  communicators().emplace_back(std::move(ranks));
  return MPI_SUCCESS;
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* copy) {
  return MPI_Comm_split(comm, 0, communicators()[comm].rank(), copy);
}

int MPI_Comm_free(MPI_Comm* comm) {
  *comm = MPI_COMM_NULL;
  return MPI_SUCCESS;
}

int MPI_Type_contiguous(int count, MPI_Datatype of, MPI_Datatype* type) {
  state().type_bytes.push_back(static_cast<int>(count * bytes_of(of)));
  *type = 999 + static_cast<int>(state().type_bytes.size());
  return MPI_SUCCESS;
}

int MPI_Type_commit(MPI_Datatype*) { return MPI_SUCCESS; }
int MPI_Type_free(MPI_Datatype*) { return MPI_SUCCESS; }

int MPI_Op_create(MPI_User_function* function, int, MPI_Op* op) {
  state().functions.push_back(function);
  *op = 99 + static_cast<int>(state().functions.size());
  return MPI_SUCCESS;
}

int MPI_Op_free(MPI_Op*) { return MPI_SUCCESS; }

int MPI_Iallreduce(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm c,
                   MPI_Request* request) {
  const int64_t bytes = n * bytes_of(type);
  return start(c, {"allreduce", -1, type, op}, in, bytes, new_request(request, out));
}

int MPI_Iallgatherv(const void* in, int n, MPI_Datatype type, void* out, const int* counts,
                    const int* starts, MPI_Datatype, MPI_Comm c, MPI_Request* request) {
  const Communicator& comm = communicators()[c];
  int all = 0;
  for (int r = 0; r < comm.size(); all += counts[r++])
    if (starts[r] != all) simulation->violate("an allgather with gaps");
  if (n != counts[comm.rank()]) simulation->violate("an allgather of different sizes");
  return start(c, {"allgather", -1, type, 0, {counts, counts + comm.size()}}, in,
               n * bytes_of(type), new_request(request, out));
}

int MPI_Iallgather(const void* in, int n, MPI_Datatype type, void* out, int, MPI_Datatype,
                   MPI_Comm c, MPI_Request* request) {
  return start(c, {"allgather", -1, type, 0}, in, n * bytes_of(type), new_request(request, out));
}

int MPI_Ialltoall(const void* in, int n, MPI_Datatype type, void* out, int, MPI_Datatype,
                  MPI_Comm c, MPI_Request* request) {
  const int64_t bytes = n * bytes_of(type);
  return start(c, {"alltoall", -1, type, 0}, in, bytes * communicators()[c].size(),
               new_request(request, out, bytes));
}

int MPI_Ibcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm c, MPI_Request* request) {
  const int64_t bytes = n * bytes_of(type);
  return start(c, {"bcast", root, type, 0}, data, bytes, new_request(request, data));
}

int MPI_Allreduce(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm c) {
  MPI_Request request;
  MPI_Iallreduce(in, out, n, type, op, c, &request);
  return finished(&request);
}

int MPI_Allgather(const void* in, int n, MPI_Datatype type, void* out, int each, MPI_Datatype of,
                  MPI_Comm c) {
  MPI_Request request;
  MPI_Iallgather(in, n, type, out, each, of, c, &request);
  return finished(&request);
}

int MPI_Bcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm c) {
  MPI_Request request;
  MPI_Ibcast(data, n, type, root, c, &request);
  return finished(&request);
}

int MPI_Barrier(MPI_Comm c) {
  int nothing = 0, all = 0;
  return MPI_Allreduce(&nothing, &all, 1, MPI_INT, MPI_MAX, c);
}
