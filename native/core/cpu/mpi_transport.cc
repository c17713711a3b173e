#include "core/cpu/mpi_transport.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// Measured with Open MPI 5: calls of 4 MiB move several times as many bytes a second as calls of 64
// MiB.
constexpr int64_t kChunkBytes = 4 << 20;

// An allreduce of at most so many bytes takes little longer than to wake the engine's thread and to
// be woken by it.
constexpr int64_t kBriefBytes = 16 << 10;

// A rank can have given up what the others complete only if it waited for the last of them.
constexpr double kLateSeconds = 10e-3;

// Of proposals; other messages of this communicator have other tags.
constexpr int kTag = 2;

// Of what ranks combine: most is shorter.
constexpr int64_t kFirstBytes = 1024;

constexpr int64_t kPieceBytes = Messages::kPieceBytes;

MPI_Comm duplicate(MPI_Comm communicator) {
  MPI_Comm own;
  HVD_MPI(MPI_Comm_dup(communicator, &own));
  return own;
}

std::string host_name() {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  HVD_MPI(MPI_Get_processor_name(name, &length));
  return std::string(name, length);
}

}  // namespace

MpiTransport::MpiTransport(MPI_Comm communicator, std::vector<int> ranks, int few)
    : ranks_(std::move(ranks)),
      communicator_(duplicate(communicator)),
      rank_(rank_in(communicator_)),
      waiter_(std::make_unique<MpiWaiter>(communicator_, ranks_, few)),
      proposals_(communicator_, kTag) {
  const Waiting patient = [](double, const Missing&) { return std::string(); };
  for (const std::string& name : gather(host_name(), patient)) {
    if (hosts_.empty() || hosts_.back() != name) hosts_.push_back(name);
    host_of_.push_back(static_cast<int>(hosts_.size()) - 1);
  }
}

MpiTransport::~MpiTransport() {
  waiter_.reset();
  HVD_MPI(MPI_Comm_free(&communicator_));
}

void MpiTransport::wait(MPI_Request request) {
  std::vector<MPI_Request> one{request};
  waiter_->wait(one, waiting_);
}

void MpiTransport::wait(InterHostExchange& exchange) {
  MpiWaiter::Wait wait(*waiter_, waiting_);
  while (!exchange.done()) wait.turn(exchange.advance());
}

std::optional<Summary> MpiTransport::agree(const Proposal& mine, const Request* next,
                                           const Waiting& waiting) {
  if (!waiting && !is_brief(*next)) return {};
  waiting_ = waiting;
  if (!proposals_.started()) propose(mine, next);
  const auto poll = [this] {
    return proposals_.done() || (proposals_.advance(), proposals_.done());
  };
  if (!waiting && !done_briefly(size(), poll)) return {};
  if (waiting) wait(proposals_);
  const Summary all = proposals_.all();
  proposals_.end();
  if (all.least != all.most) along_.reset();
  note_agreement();
  return all;
}

bool MpiTransport::is_brief(const Request& request) {
  return adds_up(request.kind) && request.device == kOnHost && input_bytes(request) <= kBriefBytes;
}

void MpiTransport::propose(const Proposal& mine, const Request* next) {
  waiter_->next_step();
  along_ = next ? small_group(*next, ProposalExchange::most_along(size())) : std::nullopt;
  const int64_t bytes = along_ ? along_->in.left() : 0;
  chunk_.resize(bytes);
  if (along_) along_->in.copy_to(chunk_.data(), bytes);
  proposals_.start(Summary(mine, rank_), chunk_.data(), bytes);
}

void MpiTransport::note_agreement() {
  // Some may have come, but no longer wait.
  if (seconds_since(agreed_) > kLateSeconds) waiter_->check_aborted();
  agreed_ = Clock::now();
}

void MpiTransport::allreduce(Request& request) {
  const Factors factors = factors_of(request, size());
  if (along_) {
    std::vector<const void*> sources;
    for (int r = 0; r < size(); ++r) sources.push_back(proposals_.along(r));
    const int64_t bytes = along_->out.left();
    chunk_.resize(bytes);
    loops().reduce(along_->dtype, request.reduction, factors, sources.data(), size(),
                   bytes / size_of(along_->dtype), chunk_.data());
    if (gets_sums(request)) along_->out.copy_from(chunk_.data(), bytes);
    along_.reset();
    return;
  }
  const int root = request.kind == Kind::reduce ? number_in_set(request.root) : -1;
  for (DTypeGroup& group : by_dtype(request)) {
    while (group.in.left() > 0) {
      const int64_t bytes = std::min(kChunkBytes, group.in.left());
      chunk_.resize(bytes);
      group.in.copy_to(chunk_.data(), bytes);
      exchange_ = new_inter_host_allreduce(Allreduce::direct, communicator_,
                                           {chunk_.data(), bytes / size_of(group.dtype),
                                            group.dtype, request.reduction, factors, root},
                                           0);
      wait(*exchange_);
      if (gets_sums(request)) group.out.copy_from(chunk_.data(), bytes);
    }
  }
}

void MpiTransport::reducescatter(const Request& request, size_t i) {
  const std::vector<int64_t> begin = scattered(request.inputs[i], size());
  const char* in = static_cast<const char*>(request.inputs[i].data);
  const DType dtype = request.inputs[i].dtype;
  const int64_t step = kChunkBytes / size() / kWidest * kWidest;
  std::vector<const void*> sources(size());
  // Rank 0 has the longest slice, and all make as many steps as it needs.
  for (int64_t start = 0; start < begin[1]; start += step) {
    const auto slice = [&](int r) { return in + begin[r] + start; };
    const auto length = [&](int r) {
      return std::clamp<int64_t>(begin[r + 1] - begin[r] - start, 0, step);
    };
    const int64_t mine = length(rank_);
    received_.resize(mine * size());
    Messages messages(communicator_);
    for (int r : others(rank_, size())) messages.receive(received_.data() + r * mine, mine, r);
    for (int r : others(rank_, size())) messages.send(slice(r), length(r), r);
    waiter_->wait(messages, waiting_);
    if (mine == 0) continue;
    for (int r = 0; r < size(); ++r)
      sources[r] = r == rank_ ? slice(r) : received_.data() + r * mine;
    loops().reduce(dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
                   mine / size_of(dtype), static_cast<char*>(request.outputs[i]) + start);
  }
}

void MpiTransport::exchange(const std::vector<Part>& sent, const std::vector<Part>& received) {
  Messages messages(communicator_);
  for (const Part& part : received) {
    if (part.rank != rank_) messages.receive(part.data, part.bytes, part.rank);
  }
  for (const Part& part : sent) {
    if (part.rank != rank_) messages.send(part.data, part.bytes, part.rank);
  }
  copy_own(sent, received, rank_);
  waiter_->wait(messages, waiting_);
}

// Each rank gets its own numbers alone: those of all would be N^2.
std::vector<int64_t> MpiTransport::exchange_numbers(const std::vector<int64_t>& mine,
                                                    const Waiting& waiting) {
  begin(waiting);
  std::vector<int64_t> numbers(mine.size());
  const int bytes = static_cast<int>(mine.size() * sizeof(int64_t)) / size();
  MPI_Request exchanged;
  HVD_MPI(MPI_Ialltoall(mine.data(), bytes, MPI_BYTE, numbers.data(), bytes, MPI_BYTE,
                        communicator_, &exchanged));
  wait(exchanged);
  return numbers;
}

// Null: nothing. The size goes with the first bytes, and what is longer follows.
void MpiTransport::exchange_bytes(const std::string* sent, std::string* received, int other) {
  const int64_t size = sent ? static_cast<int64_t>(sent->size()) : 0;
  int64_t coming = 0;
  std::string first(reinterpret_cast<const char*>(&size), sizeof size);
  if (sent) first.append(*sent, 0, kFirstBytes);
  std::string theirs(sizeof coming + kFirstBytes, '\0');
  Messages messages(communicator_);
  if (received) messages.receive(theirs.data(), static_cast<int64_t>(theirs.size()), other);
  if (sent) messages.send(first.data(), static_cast<int64_t>(first.size()), other);
  waiter_->wait(messages, waiting_);
  std::memcpy(&coming, theirs.data(), sizeof coming);
  if (received) received->assign(theirs, sizeof coming, std::min(coming, kFirstBytes));
  if (received) received->resize(coming);
  if (coming > kFirstBytes)
    messages.receive(received->data() + kFirstBytes, coming - kFirstBytes, other);
  if (size > kFirstBytes) messages.send(sent->data() + kFirstBytes, size - kFirstBytes, other);
  waiter_->wait(messages, waiting_);
}

// By recursive doubling. Ranks beyond a power of two give theirs to others, and get the result.
std::string MpiTransport::reduce(const std::string& mine, const Combine& combine,
                                 const Waiting& waiting) {
  begin(waiting);
  const int power = 1 << std::ilogb(size()), beyond = size() - power;
  std::string some = mine, others;
  if (rank_ >= power) {
    exchange_bytes(&some, nullptr, rank_ - power);
    exchange_bytes(nullptr, &some, rank_ - power);
    return some;
  }
  if (rank_ < beyond) {
    exchange_bytes(nullptr, &others, rank_ + power);
    some = combine(some, others);
  }
  for (int away = 1; away < power; away *= 2) {
    exchange_bytes(&some, &others, rank_ ^ away);
    some = combine(some, others);
  }
  if (rank_ < beyond) exchange_bytes(&some, nullptr, rank_ + power);
  return some;
}

void MpiTransport::broadcast(Request& request) {
  const int root = number_in_set(request.root);
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    char* out = static_cast<char*>(request.outputs[i]);
    const int64_t bytes = static_cast<int64_t>(input.bytes());
    if (rank_ == root && out != input.data && bytes > 0) std::memcpy(out, input.data, bytes);
    for (int64_t start = 0; start < bytes; start += kPieceBytes) {
      MPI_Request sent;
      HVD_MPI(MPI_Ibcast(out + start, static_cast<int>(std::min(kPieceBytes, bytes - start)),
                         MPI_BYTE, root, communicator_, &sent));
      wait(sent);
    }
  }
}

void MpiTransport::gather_bytes(const void* mine, const std::vector<int64_t>& sizes, void* all) {
  std::vector<int64_t> offsets(size(), 0);
  for (int r = 1; r < size(); ++r) offsets[r] = offsets[r - 1] + sizes[r - 1];
  if (offsets.back() + sizes.back() <= kPieceBytes) {
    const std::vector<int> counts(sizes.begin(), sizes.end());
    const std::vector<int> starts(offsets.begin(), offsets.end());
    MPI_Request gathered;
    HVD_MPI(MPI_Iallgatherv(mine, counts[rank_], MPI_BYTE, all, counts.data(), starts.data(),
                            MPI_BYTE, communicator_, &gathered));
    return wait(gathered);
  }
  char* out = static_cast<char*>(all);
  Messages messages(communicator_);
  for (int r : others(rank_, size())) messages.receive(out + offsets[r], sizes[r], r);
  for (int r : others(rank_, size())) messages.send(mine, sizes[rank_], r);
  // Its own, too, over MPI: the memory may be a GPU's.
  messages.receive(out + offsets[rank_], sizes[rank_], rank_);
  messages.send(mine, sizes[rank_], rank_);
  waiter_->wait(messages, waiting_);
}

}  // namespace hvd
