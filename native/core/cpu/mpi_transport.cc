#include "core/cpu/mpi_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/cpu/mpi_error.h"
#include "core/math/adasum.h"
#include "core/math/loops.h"
#include "core/request/collectives.h"

namespace hvd {
namespace {

// Measured with Open MPI 5: calls of 4 MiB move several times as many bytes a second as calls of 64
// MiB.
constexpr int64_t kChunkBytes = 4 << 20;

// Below this, one MPI_Iallgather of everything is faster than scatter and gather of slices,
// although it moves more bytes.
constexpr int64_t kSmallBytes = 16 << 10;

// Larger messages are split: MPI counts are ints, and each piece that arrives is progress, which
// restarts the deadline.
constexpr int64_t kPieceBytes = 64 << 20;

std::string host_name() {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  HVD_MPI(MPI_Get_processor_name(name, &length));
  return std::string(name, length);
}

}  // namespace

// Messages of any size between this rank and others; all are in flight at once.
class MpiTransport::Exchange {
 public:
  explicit Exchange(MpiTransport& transport) : transport_(transport) {}

  void receive(void* data, int64_t bytes, int from) {
    in_pieces(bytes, [&](int64_t start, int n) {
      HVD_MPI(MPI_Irecv(static_cast<char*>(data) + start, n, MPI_BYTE, from, 0,
                        transport_.communicator_, add()));
    });
  }

  void send(const void* data, int64_t bytes, int to) {
    in_pieces(bytes, [&](int64_t start, int n) {
      HVD_MPI(MPI_Isend(static_cast<const char*>(data) + start, n, MPI_BYTE, to, 0,
                        transport_.communicator_, add()));
    });
  }

  // All other ranks. Each rank starts with a different one, so that no rank receives from all at
  // once.
  template <typename Visit>
  void with_others(const Visit& visit) const {
    for (int i = 1; i < transport_.size(); ++i) visit((transport_.rank_ + i) % transport_.size());
  }

  void finish() { transport_.waiter_->wait(requests_, transport_.waiting_); }

 private:
  template <typename Piece>
  static void in_pieces(int64_t bytes, const Piece& piece) {
    for (int64_t start = 0; start < bytes; start += kPieceBytes)
      piece(start, static_cast<int>(std::min(kPieceBytes, bytes - start)));
  }

  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  MpiTransport& transport_;
  std::vector<MPI_Request> requests_;
};

MpiTransport::MpiTransport(MPI_Comm communicator, std::vector<int> ranks, int few)
    : ranks_(std::move(ranks)), few_(few) {
  HVD_MPI(MPI_Comm_dup(communicator, &communicator_));
  HVD_MPI(MPI_Comm_rank(communicator_, &rank_));
  HVD_MPI(MPI_Type_contiguous(sizeof(Summary) / sizeof(uint64_t), MPI_UINT64_T, &summary_type_));
  HVD_MPI(MPI_Type_commit(&summary_type_));
  HVD_MPI(MPI_Op_create(combine, 1, &combine_));
  waiter_ = std::make_unique<MpiWaiter>(communicator_, ranks_);
  hosts_ = gather(host_name(), [](double, const std::vector<int>&) { return std::string(); });
}

MpiTransport::~MpiTransport() {
  waiter_.reset();
  HVD_MPI(MPI_Op_free(&combine_));
  HVD_MPI(MPI_Type_free(&summary_type_));
  HVD_MPI(MPI_Comm_free(&communicator_));
}

void MpiTransport::wait(MPI_Request request) {
  std::vector<MPI_Request> one{request};
  waiter_->wait(one, waiting_);
}

std::vector<Proposal> MpiTransport::agree(const Proposal& mine, const Waiting& waiting) {
  waiter_->next_step();
  waiting_ = waiting;
  my_proposal_ = mine;
  if (size() == 1) return {mine};
  return size() <= few_ ? gather_proposals() : reduce_proposals();
}

void MpiTransport::combine(void* in, void* inout, int* count, MPI_Datatype*) {
  const Summary* const other = static_cast<const Summary*>(in);
  Summary* const summary = static_cast<Summary*>(inout);
  for (int i = 0; i < *count; ++i) {
    Summary& into = summary[i];
    const Summary& from = other[i];
    into.least = std::min(into.least, from.least);
    into.most = std::max(into.most, from.most);
    into.flags |= from.flags;
    const auto earlier = std::min(std::pair(into.waited_least, into.first),
                                  std::pair(from.waited_least, from.first));
    into.waited_least = earlier.first;
    into.first = earlier.second;
    into.waited += from.waited;
  }
}

std::vector<Proposal> MpiTransport::reduce_proposals() {
  const uint64_t print = my_proposal_.fingerprint, waited = my_proposal_.wait_times.waited_ns;
  my_summary_ = {print, print, my_proposal_.flags, waited, static_cast<uint64_t>(rank_), waited};
  MPI_Request request;
  HVD_MPI(
      MPI_Iallreduce(&my_summary_, &summary_, 1, summary_type_, combine_, communicator_, &request));
  wait(request);
  if (summary_.flags & Proposal::wants_times) return gather_proposals();
  const uint64_t mean = (summary_.waited - summary_.waited_least) / (size() - 1);
  const uint64_t others = summary_.least != print ? summary_.least : summary_.most;
  proposals_.assign(size(), {others, summary_.flags, {mean, 0, 0}});
  proposals_[summary_.first].wait_times.waited_ns = summary_.waited_least;
  return proposals_;
}

std::vector<Proposal> MpiTransport::gather_proposals() {
  proposals_.resize(size());
  constexpr int kWords = sizeof(Proposal) / sizeof(uint64_t);
  static_assert(sizeof(Proposal) == kWords * sizeof(uint64_t));
  MPI_Request request;
  HVD_MPI(MPI_Iallgather(&my_proposal_, kWords, MPI_UINT64_T, proposals_.data(), kWords,
                         MPI_UINT64_T, communicator_, &request));
  wait(request);
  return proposals_;
}

std::vector<std::string> MpiTransport::gather(const std::string& mine, const Waiting& waiting) {
  waiter_->next_step();
  waiting_ = waiting;
  std::vector<int64_t> sizes;
  gather_numbers({static_cast<int64_t>(mine.size())}, &sizes);
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  std::string all(total, '\0');
  gather_bytes(mine.data(), sizes, all.data());
  std::vector<std::string> parts;
  int64_t offset = 0;
  for (int64_t size : sizes) {
    parts.push_back(all.substr(offset, size));
    offset += size;
  }
  return parts;
}

Status MpiTransport::run(Request& request, const Waiting& waiting) {
  waiter_->next_step();
  return KindTransport::run(request, waiting);
}

Status MpiTransport::allreduce(Request& request) {
  for (DTypeGroup& group : by_dtype(request)) {
    while (group.in.left() > 0) {
      const int64_t bytes = std::min(kChunkBytes, group.in.left());
      chunk_.resize(bytes);
      group.in.copy_to(chunk_.data(), bytes);
      reduce_chunk(request, group.dtype, bytes / static_cast<int64_t>(size_of(group.dtype)));
      group.out.copy_from(chunk_.data(), bytes);
    }
  }
  return {};
}

void MpiTransport::reduce_chunk(const Request& request, DType dtype, int64_t elements) {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  const int64_t bytes = elements * width;
  if (bytes <= kSmallBytes || size() == 1) {
    received_.resize(bytes * size());
    MPI_Request gathered;
    HVD_MPI(MPI_Iallgather(chunk_.data(), static_cast<int>(bytes), MPI_BYTE, received_.data(),
                           static_cast<int>(bytes), MPI_BYTE, communicator_, &gathered));
    wait(gathered);
    combine_slices(request, dtype, nullptr, bytes, chunk_.data());
    return;
  }
  // Slice j is [bound(j), bound(j + 1)).
  const auto bound = [&](int j) { return elements * j / size() * width; };
  const auto slice = [&](int j) { return chunk_.data() + bound(j); };
  const auto length = [&](int j) { return bound(j + 1) - bound(j); };
  const int64_t mine = length(rank_);
  received_.resize(mine * size());
  Exchange scatter(*this);
  scatter.with_others([&](int r) { scatter.receive(received_.data() + r * mine, mine, r); });
  scatter.with_others([&](int r) { scatter.send(slice(r), length(r), r); });
  scatter.finish();
  combine_slices(request, dtype, slice(rank_), mine, slice(rank_));
  Exchange gather(*this);
  gather.with_others([&](int r) { gather.receive(slice(r), length(r), r); });
  gather.with_others([&](int r) { gather.send(slice(rank_), mine, r); });
  gather.finish();
}

// Reduces the slices of all ranks, which are contiguous in received_; this rank's own is at `own`
// if that is not null.
void MpiTransport::combine_slices(const Request& request, DType dtype, const char* own,
                                  int64_t bytes, char* out) {
  std::vector<const void*> sources(size());
  for (int r = 0; r < size(); ++r)
    sources[r] = own && r == rank_ ? own : received_.data() + r * bytes;
  loops().reduce(dtype, request.reduction, factors_of(request, size()), sources.data(), size(),
                 bytes / static_cast<int64_t>(size_of(dtype)), out);
}

Status MpiTransport::adasum(Request& request) {
  hvd::adasum(
      request, rank_, size(),
      {[this](const auto& sent, const auto& received) { exchange(sent, received); },
       [this](const auto& mine) {
         const int n = static_cast<int>(mine.size());
         std::vector<double> all(mine.size() * size());
         MPI_Request gathered;
         HVD_MPI(MPI_Iallgather(mine.data(), n, MPI_DOUBLE, all.data(), n, MPI_DOUBLE,
                                communicator_, &gathered));
         wait(gathered);
         return all;
       },
       [this](const void* mine, const auto& sizes, void* all) { gather_bytes(mine, sizes, all); }});
  return {};
}

Status MpiTransport::reducescatter(Request& request) {
  Status status = allocate_scattered(request, rank_, size());
  if (status = agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    Shape row = input.shape;
    row[0] = 1;
    const int64_t width = static_cast<int64_t>(size_of(input.dtype)), of_row = elements(row);
    const auto begin = [&](int j) { return first_row(input.shape[0], j, size()) * of_row * width; };
    const char* in = static_cast<const char*>(input.data);
    const int64_t step = kChunkBytes / size() / width * width;
    // Rank 0 has the longest slice, and all make as many steps as it needs.
    for (int64_t start = 0; start < begin(1); start += step) {
      const auto length = [&](int j) {
        return std::clamp<int64_t>(begin(j + 1) - begin(j) - start, 0, step);
      };
      const int64_t mine = length(rank_);
      received_.resize(mine * size());
      Exchange scatter(*this);
      scatter.with_others([&](int r) { scatter.receive(received_.data() + r * mine, mine, r); });
      scatter.with_others([&](int r) { scatter.send(in + begin(r) + start, length(r), r); });
      scatter.finish();
      if (mine > 0) {
        combine_slices(request, input.dtype, in + begin(rank_) + start, mine,
                       static_cast<char*>(request.outputs[i]) + start);
      }
    }
  }
  return {};
}

Status MpiTransport::allgather(Request& request) {
  const size_t n = request.inputs.size();
  std::vector<int64_t> my_rows(n), rows;
  for (size_t i = 0; i < n; ++i) my_rows[i] = request.inputs[i].shape[0];
  gather_numbers(my_rows, &rows);

  std::vector<std::vector<int64_t>> sizes;
  Status status = allocate_gathered(request, rows, size(), &sizes);
  if (status = agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < n; ++i) gather_bytes(request.inputs[i].data, sizes[i], request.outputs[i]);
  return {};
}

Status MpiTransport::alltoall(Request& request) {
  std::vector<int64_t> my_splits, splits;
  for (size_t i = 1; i < request.inputs.size(); i += 2) {
    const int64_t* own = static_cast<const int64_t*>(request.inputs[i].data);
    my_splits.insert(my_splits.end(), own, own + size());
  }
  gather_numbers(my_splits, &splits);
  std::vector<Part> sent, received;
  Status status = allocate_exchanged(request, splits, rank_, size(), &sent, &received);
  if (status = agree_on(status, request); !status.ok()) return status;
  exchange(sent, received);
  return {};
}

void MpiTransport::exchange(const std::vector<Part>& sent, const std::vector<Part>& received) {
  Exchange exchange(*this);
  for (const Part& part : received) {
    if (part.rank != rank_) exchange.receive(part.data, part.bytes, part.rank);
  }
  for (const Part& part : sent) {
    if (part.rank != rank_) exchange.send(part.data, part.bytes, part.rank);
  }
  copy_own(sent, received, rank_);
  exchange.finish();
}

Status MpiTransport::broadcast(Request& request) {
  const int root =
      static_cast<int>(std::find(ranks_.begin(), ranks_.end(), request.root) - ranks_.begin());
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
  return {};
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
  Exchange exchange(*this);
  exchange.with_others([&](int r) { exchange.receive(out + offsets[r], sizes[r], r); });
  exchange.with_others([&](int r) { exchange.send(mine, sizes[rank_], r); });
  // Its own, too, over MPI: the memory may be a GPU's.
  exchange.receive(out + offsets[rank_], sizes[rank_], rank_);
  exchange.send(mine, sizes[rank_], rank_);
  exchange.finish();
}

// Equally many from each rank.
void MpiTransport::gather_numbers(const std::vector<int64_t>& mine, std::vector<int64_t>* all) {
  const int n = static_cast<int>(mine.size());
  all->resize(mine.size() * size());
  MPI_Request gathered;
  HVD_MPI(MPI_Iallgather(mine.data(), n, MPI_INT64_T, all->data(), n, MPI_INT64_T, communicator_,
                         &gathered));
  wait(gathered);
}

Status MpiTransport::agree_on(const Status& mine, const Request& request) {
  std::vector<int64_t> failed;
  gather_numbers({mine.ok() ? 0 : 1}, &failed);
  return all_or_none(mine, failed, ranks_, request);
}

}  // namespace hvd
