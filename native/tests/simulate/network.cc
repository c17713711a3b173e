#include "tests/simulate/network.h"

#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "tests/simulate/mpi_state.h"

namespace hvd::sim {
namespace {

using std::string;
using std::to_string;
using std::vector;

// So many messages of a job: each may wait for the one before.
constexpr int kMostLate = 4;

struct Message {
  int from, to, comm, tag;  // `from` and `to`: ranks of the job
  int64_t bytes;
  vector<char> data;
  const char* source;  // of a message that waits for the receiver
  MPI_Request sending, receiving;
};
using Shared = std::shared_ptr<Message>;

struct Network {
  Conditions conditions;
  vector<std::unordered_map<int, Nanoseconds>> last;  // arrival, by sender and receiver
  std::map<std::pair<int, int>, Nanoseconds> cuts;    // by two hosts
  struct Box {
    std::deque<MPI_Request> receives;
    std::deque<Shared> messages;  // that nobody has asked for
  };
  vector<std::unordered_map<MPI_Comm, Box>> boxes;  // by rank and communicator
  vector<vector<std::function<void()>>> arrived;    // by receiver
  vector<vector<Shared>> cleared;                   // by sender: the receiver waits
  bool aborted = false;
  int late = 0;  // messages
};

std::unique_ptr<Network> network;

bool is_cut(int host, int other) {
  const auto found = network->cuts.find(std::minmax(host, other));
  return found != network->cuts.end() && simulation->now > found->second;
}

// When what a rank sends now arrives. Of one sender in order, of several in any.
Nanoseconds arrival(int from, int to) {
  const Conditions& is = network->conditions;
  auto& random = simulation->random;
  Nanoseconds time = simulation->now + is.latency / 2 + random.upto(is.latency);
  if (is.most_late > 0 && random.chance(50) && network->late++ < kMostLate)
    time += random.upto(is.most_late);
  Nanoseconds& last = network->last[from][to];
  return last = std::max(last + 1, time);
}

void put(const Message& message, MPI_Request request) {
  if (message.bytes > request->bytes)
    return simulation->violate("a message of " + to_string(message.bytes) + " bytes for " +
                               to_string(request->bytes));
  std::copy(message.data.begin(), message.data.end(), request->data);
  request->done = true;
}

// A message and its receiver have met.
void match(const Shared& message, MPI_Request request) {
  if (!message->source) return put(*message, request);
  message->receiving = request;
  deliver(message->to, message->from,
          [message] { network->cleared[message->from].push_back(message); });
}

void arrive(const Shared& message) {
  Network::Box& box = network->boxes[message->to][message->comm];
  const auto found = std::find_if(box.receives.begin(), box.receives.end(), [&](MPI_Request r) {
    return r->from == message->from && r->tag == message->tag;
  });
  if (found == box.receives.end()) return box.messages.push_back(message);
  const MPI_Request request = *found;
  box.receives.erase(found);
  match(message, request);
}

}  // namespace

void deliver(int from, int to, std::function<void()> action) {
  simulation->at(arrival(from, to), [from, to, action] {
    Process &sender = simulation->processes[from], &receiver = simulation->processes[to];
    const bool lost =
        receiver.dead || simulation->now > sender.heard_until || is_cut(sender.host, receiver.host);
    if (lost) return;
    network->arrived[to].push_back(action);
    simulation->notify(receiver);
  });
}

// MPI works when it is called: then it writes what has come, and sends what receivers wait for.
int enter() {
  Process& own = simulation->process();
  if (own.aborted) simulation->violate("MPI is called after an abort");
  for (const auto& action : std::exchange(network->arrived[own.rank], {})) action();
  for (const Shared& message : std::exchange(network->cleared[own.rank], {})) {
    message->data.assign(message->source, message->source + message->bytes);
    message->sending->done = true;
    deliver(message->from, message->to, [message] { put(*message, message->receiving); });
  }
  return own.link_error ? MPI_ERR_OTHER : MPI_SUCCESS;
}

MPI_Request new_request(MPI_Request* to, void* data, int64_t bytes) {
  *to = new SimulatedRequest();
  (*to)->data = static_cast<char*>(data);
  (*to)->bytes = bytes;
  return *to;
}

int finished(MPI_Request* request) {
  while (!(*request)->done) {
    simulation->sleep(100 * kMicrosecond);
    enter();
  }
  delete *request;
  *request = nullptr;
  return MPI_SUCCESS;
}

void new_memory();  // in memory.cc

void new_network(const Conditions& conditions) {
  new_memory();
  network = std::make_unique<Network>();
  network->conditions = conditions;
  const size_t ranks = simulation->processes.size();
  network->last.resize(ranks);
  network->boxes.resize(ranks);
  network->arrived.resize(ranks);
  network->cleared.resize(ranks);
  vector<int> all;
  for (const Process& process : simulation->processes) all.push_back(process.rank);
  communicators().emplace_back(std::move(all));
}

void cut(int host, int other, bool noticed) {
  network->cuts[std::minmax(host, other)] = simulation->now;
  if (!noticed) return;
  for (Process& process : simulation->processes) {
    if (process.host != host && process.host != other) continue;
    simulation->at(simulation->now + simulation->random.upto(1500) * kMillisecond, [&process] {
      process.link_error = true;
      simulation->notify(process);
    });
  }
}

int64_t shared_bytes(int host) {
  const Conditions& is = network->conditions;
  return is.poor_host < 0 || is.poor_host == host ? is.shared_bytes : INT64_MAX;
}

bool mpi_aborted() { return network->aborted; }

}  // namespace hvd::sim

using namespace hvd::sim;

int MPI_Abort(MPI_Comm, int) {
  network->aborted = true;
  simulation->trace("MPI_Abort");
  for (Process& process : simulation->processes) {
    simulation->at(simulation->now + simulation->random.upto(500) * kMillisecond,
                   [&process] { simulation->kill(process); });
  }
  simulation->block(kNever);
  return MPI_SUCCESS;
}

int MPI_Error_string(int, char* text, int* length) {
  *length = static_cast<int>(string("a link is cut").copy(text, MPI_MAX_ERROR_STRING));
  return MPI_SUCCESS;
}

int MPI_Get_processor_name(char* name, int* length) {
  const string host = "host" + to_string(simulation->process().host);
  *length = static_cast<int>(host.copy(name, MPI_MAX_PROCESSOR_NAME));
  return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm c,
              MPI_Request* request) {
  const int code = enter();
  const int64_t bytes = n * bytes_of(type);
  const int from = simulation->process().rank;
  count(1, bytes);
  new_request(request);
  const auto message = std::make_shared<Message>(
      Message{from, communicators()[c].ranks[to], c, tag, bytes, {}, nullptr, *request, {}});
  if (bytes <= network->conditions.eager_bytes) {
    const char* const source = static_cast<const char*>(data);
    message->data.assign(source, source + bytes);
    (*request)->done = true;
  } else {
    message->source = static_cast<const char*>(data);
  }
  deliver(from, message->to, [message] { arrive(message); });
  return code;
}

int MPI_Irecv(void* data, int n, MPI_Datatype type, int from, int tag, MPI_Comm c,
              MPI_Request* request) {
  const int code = enter();
  new_request(request, data, n * bytes_of(type));
  (*request)->from = communicators()[c].ranks[from];
  (*request)->tag = tag;
  Network::Box& box = network->boxes[simulation->process().rank][c];
  const auto found = std::find_if(box.messages.begin(), box.messages.end(), [&](const Shared& m) {
    return m->from == (*request)->from && m->tag == tag;
  });
  if (found == box.messages.end()) {
    box.receives.push_back(*request);
  } else {
    const Shared message = *found;
    box.messages.erase(found);
    match(message, *request);
  }
  return code;
}

int MPI_Iprobe(int, int, MPI_Comm c, int* found, MPI_Status* status) {
  const int code = enter();
  const auto& waiting = network->boxes[simulation->process().rank][c].messages;
  *found = !waiting.empty();
  if (*found) {
    const Message& first = *waiting.front();
    *status = {communicators()[c].rank_of(first.from), first.tag, static_cast<int>(first.bytes)};
  }
  return code;
}

int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* n) {
  *n = static_cast<int>(status->bytes / bytes_of(type));
  return MPI_SUCCESS;
}

int MPI_Testall(int n, MPI_Request* requests, int* done, MPI_Status*) {
  const int code = enter();
  *done = std::all_of(requests, requests + n, [](MPI_Request r) { return !r || r->done; });
  if (!*done) simulation->spin();
  for (int i = 0; *done && i < n; ++i)
    if (requests[i]) finished(&requests[i]);
  return code;
}

int MPI_Testsome(int n, MPI_Request* requests, int* done, int* indices, MPI_Status*) {
  const int code = enter();
  *done = 0;
  bool active = false;
  for (int i = 0; i < n; ++i) {
    active |= requests[i] != nullptr;
    if (!requests[i] || !requests[i]->done) continue;
    finished(&requests[i]);
    indices[(*done)++] = i;
  }
  if (!active) *done = MPI_UNDEFINED;
  return code;
}

int MPI_Waitall(int n, MPI_Request* requests, MPI_Status*) {
  int done = 0;
  while (!done) {
    MPI_Testall(n, requests, &done, nullptr);
    if (!done) simulation->sleep(20 * kMicrosecond);
  }
  return MPI_SUCCESS;
}
