#include "core/cpu/cluster_transport.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/cpu/mpi_wait.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

// A chunk is cut into one message per leader and host. These must be large enough for bandwidth,
// not latency, to dominate, and a chunk must fit the caches. Smaller chunks fill and drain the
// pipeline faster: over three links of 100 Mbit/s, 10 MB took 1.15 of the least possible time with
// chunks of 1 MiB and 1.06 with 256 KiB.
constexpr int64_t kMessageBytes = 64 << 10;
constexpr int64_t kLeastChunkBytes = 256 << 10;
constexpr int64_t kMostChunkBytes = 1 << 20;

// Padding between slots, so that those of all ranks do not map to the same cache sets.
constexpr int64_t kGapBytes = 4096;

// Bytes of each slot that are committed from the start: enough for anything but gradients.
constexpr int64_t kSmallBytes = 4096;

// For what ranks of a host tell each other of an agreement.
constexpr int64_t kSharedBytes = 20 << 10;

// Differs from those of chunks.
constexpr int kAgreementTag = 1000;

}  // namespace

ClusterTransport::ClusterTransport(std::unique_ptr<MpiTransport>* mpi, MPI_Comm host,
                                   Allreduce algorithm)
    : algorithm_(algorithm), chunk_bytes_(kSmallBytes) {
  const MPI_Comm all = (*mpi)->communicator();
  // Messages of different algorithms would not match.
  HVD_MPI(MPI_Bcast(&algorithm_, sizeof algorithm_, MPI_BYTE, 0, all));
  number_hosts(**mpi, host);
  std::vector<int> neighbours;
  for (int r : by_host_[host_]) neighbours.push_back((*mpi)->ranks()[r]);
  algorithm_ = algorithm_for(algorithm_, hosts_);
  full_chunk_bytes_ =
      std::clamp(kMessageBytes * leaders_ * hosts_, kLeastChunkBytes, kMostChunkBytes);

  std::string why;
  try {
    const SharedMemory::Area slot = {full_chunk_bytes_ + kGapBytes, kSmallBytes};
    std::vector<SharedMemory::Area> areas(kWindow, slot);
    areas.push_back({kSharedBytes, kSharedBytes});
    memory_ = std::make_unique<SharedMemory>(host, neighbours, areas);
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  int failed = why.empty() ? 0 : 1;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, all));
  if (failed) throw std::runtime_error(why.empty() ? "those of another host cannot" : why);
  // By the number of the host, so that all slices are summed in the same order.
  HVD_MPI(
      MPI_Comm_split(all, local_rank_ < leaders_ ? local_rank_ : MPI_UNDEFINED, host_, &across_));
  if (local_rank_ == 0) proposals_ = std::make_unique<ProposalExchange>(across_, kAgreementTag);
  mpi_ = std::move(*mpi);
}

void ClusterTransport::number_hosts(const MpiTransport& mpi, MPI_Comm host) {
  int first = mpi.rank();  // of this host
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, host));
  std::vector<int> firsts(mpi.size()), numbers(mpi.size());
  HVD_MPI(MPI_Allgather(&first, 1, MPI_INT, firsts.data(), 1, MPI_INT, mpi.communicator()));
  for (int r = 0; r < mpi.size(); ++r) {
    if (firsts[r] == r) {
      numbers[r] = hosts_++;
      by_host_.emplace_back();
    }
    std::vector<int>& ranks = by_host_[numbers[firsts[r]]];
    place_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
  host_ = numbers[first];
  local_rank_ = place_[mpi.rank()];
  local_size_ = leaders_ = static_cast<int>(by_host_[host_].size());
  for (const std::vector<int>& ranks : by_host_) {
    leaders_ = std::min(leaders_, static_cast<int>(ranks.size()));
    most_local_ = std::max(most_local_, static_cast<int>(ranks.size()));
  }
}

ClusterTransport::~ClusterTransport() {
  if (across_ != MPI_COMM_NULL) HVD_MPI(MPI_Comm_free(&across_));
}

// What a rank gives to the first one of its host, and what that gives to all.
struct ClusterTransport::Shared {
  ProposalExchange::Message mine, all;
};

ClusterTransport::Shared& ClusterTransport::shared(int local_rank) const {
  static_assert(sizeof(Shared) <= kSharedBytes);
  return *reinterpret_cast<Shared*>(memory_->area(local_rank, kWindow));
}

std::optional<Summary> ClusterTransport::agree(const Proposal& mine, const Request* next,
                                               const Waiting& waiting) {
  if (!waiting && !MpiTransport::is_brief(*next)) return {};
  if (!proposed_) {
    begin(waiting);
    propose(mine, next);
  }
  waiting_ = waiting;
  bool progressed = false;
  const auto poll = [&] { return has_agreed(next, &progressed); };
  if (!waiting && !done_briefly(size(), poll)) return {};
  if (waiting) {
    MpiWaiter::Wait wait(mpi_->waiter(), waiting_);
    while (!poll()) wait.turn(std::exchange(progressed, false));
  }
  const Summary all = shared(0).all.summary;
  proposed_ = false;
  if (all.least != all.most) along_.reset();
  mpi_->note_agreement();
  return all;
}

void ClusterTransport::propose(const Proposal& mine, const Request* next) {
  ProposalExchange::Message& message = shared(local_rank_).mine;
  message.summary = Summary(mine, rank());
  along_ = next ? small_group(*next, ProposalExchange::most_along(hosts_)) : std::nullopt;
  if (along_) along_->in.copy_to(message.along, along_->in.left());
  memory_->counters().advance(HostCounters::arrived, 2 * agreements_++ + 1);
  proposed_ = true;
}

// Each rank's counter of arrivals is odd from its proposal on; that of the first rank is even again
// when it has published what all propose. Nobody writes anything new before all have read it.
bool ClusterTransport::has_agreed(const Request* next, bool* progressed) {
  HostCounters& counters = memory_->counters();
  const uint64_t published = 2 * agreements_;
  if (counters.least(HostCounters::arrived, 1) >= published) return true;
  if (local_rank_ != 0) return false;
  const auto sum = [&](bool of_hosts, int count, const auto& term, char* out) {
    if (!along_) return;
    const auto [within, between] = factors_of_stages(*next, along_->dtype, Allreduce::direct);
    std::vector<const void*> terms;
    for (int i = 0; i < count; ++i) terms.push_back(term(i));
    loops().reduce(along_->dtype, next->reduction, of_hosts ? between : within, terms.data(), count,
                   along_->out.left() / size_of(along_->dtype), out);
  };
  if (!proposals_->started()) {
    if (counters.least(HostCounters::arrived) < published - 1) return false;
    ProposalExchange::Message host;
    for (int r = 0; r < local_size_; ++r) host.summary.add(shared(r).mine.summary);
    sum(false, local_size_, [&](int r) { return shared(r).mine.along; }, host.along);
    proposals_->start(host.summary, host.along, along_ ? along_->out.left() : 0);
    *progressed = true;
  }
  *progressed |= proposals_->advance();
  if (!proposals_->done()) return false;
  sum(true, hosts_, [&](int h) { return proposals_->along(h); }, shared(0).all.along);
  shared(0).all.summary = proposals_->all();
  proposals_->end();
  counters.advance(HostCounters::arrived, published);
  return true;
}

char* ClusterTransport::slot(int local_rank, uint64_t chunk) const {
  return memory_->area(local_rank, chunk % kWindow);
}

// Takes chunks through their stages, in all of which up to kWindow of them are at once:
//
//   pack    when this rank's slot is free
//   start   when all ranks of this host have packed; by the first `leaders` of them. Starts the
//           messages between hosts, if pack has not
//   unpack  when the messages of all leaders of this host are complete
void ClusterTransport::in_chunks(int64_t count, int leaders, const EachChunk& pack,
                                 const EachChunk& start, const EachChunk& unpack) {
  HostCounters& counters = memory_->counters();
  uint64_t packed = chunks_, started = chunks_, complete = chunks_, unpacked = chunks_;
  const uint64_t end = chunks_ += count;
  MpiWaiter::Wait wait(mpi_->waiter(), waiting_);
  while (unpacked < end) {
    bool progressed = false;
    if (packed < end && packed < counters.least(HostCounters::unpacked) + kWindow) {
      pack(packed);
      counters.advance(HostCounters::packed, ++packed);
      progressed = true;
    }
    if (local_rank_ < leaders && started < counters.least(HostCounters::packed)) {
      start(started++);
      progressed = true;
    }
    for (const auto& messages : in_flight_) progressed |= messages->advance();
    while (!in_flight_.empty() && in_flight_.front()->done()) {
      in_flight_.pop_front();
      counters.advance(HostCounters::reduced, ++complete);
      progressed = true;
    }
    if (unpacked < counters.least(HostCounters::reduced, leaders)) {
      unpack(unpacked);
      counters.advance(HostCounters::unpacked, ++unpacked);
      progressed = true;
    }
    wait.turn(progressed);
  }
}

void ClusterTransport::allreduce(Request& request) {
  if (along_) {
    if (gets_sums(request)) along_->out.copy_from(shared(0).all.along, along_->out.left());
    along_.reset();
    return;
  }
  for (DTypeGroup& group : by_dtype(request)) {
    const int64_t width = size_of(group.dtype), total = group.in.left();
    make_room(total);
    const auto elements = [&, first = chunks_](uint64_t chunk) {
      const int64_t before = static_cast<int64_t>(chunk - first) * chunk_bytes_;
      return std::min(chunk_bytes_, total - before) / width;
    };
    in_chunks(
        (total + chunk_bytes_ - 1) / chunk_bytes_, leaders_,
        [&](uint64_t chunk) {
          group.in.copy_to(slot(local_rank_, chunk), elements(chunk) * width);
        },
        [&](uint64_t chunk) { start_inter_host(request, group.dtype, elements(chunk), chunk); },
        [&](uint64_t chunk) {
          if (!gets_sums(request)) return;
          each_slice(chunk, leaders_, elements(chunk), width,
                     [&](int, char* slice, int64_t bytes) { group.out.copy_from(slice, bytes); });
        });
  }
}

// Chunk by chunk, cut into a slice for each leader, or for the first one alone:
//
//   pack       the root's tensors ──> slice c of the slots of its host's leaders c, by the root
//   allreduce  between hosts: slice c of that host, and zeros of the others, by leaders c. For H
//              hosts, a link sends 2(H-1)/H of the bytes; of MPI_Ibcast the root's sends up to H-1
//              times the bytes
//   unpack     the leaders' slices ──> output tensors
void ClusterTransport::broadcast(Request& request) {
  const int root = number_in_set(request.root), root_host = host_of_root(request);
  auto [in, out] = broadcast_tensors(request);
  const int64_t total = in.left();
  make_room(total);
  const int leaders = total < kMessageBytes ? 1 : leaders_;
  const auto slices = [&, first = chunks_](uint64_t chunk, const auto& call) {
    const int64_t before = static_cast<int64_t>(chunk - first) * chunk_bytes_;
    each_slice(chunk, leaders, std::min(chunk_bytes_, total - before), 1, call);
  };
  in_chunks((total + chunk_bytes_ - 1) / chunk_bytes_, leaders,
            [&, &in = in](uint64_t chunk) {
              if (rank() == root)
                slices(chunk, [&](int, char* slice, int64_t bytes) { in.copy_to(slice, bytes); });
            },
            [&](uint64_t chunk) {
              slices(chunk, [&](int c, char* slice, int64_t bytes) {
                if (c != local_rank_) return;
                if (host_ != root_host) std::memset(slice, 0, bytes);
                start_inter_host({slice, bytes, DType::uint8, Reduction::sum, {}}, chunk);
              });
            },
            [&, &out = out](uint64_t chunk) {
              if (rank() != root)
                slices(chunk,
                       [&](int, char* slice, int64_t bytes) { out.copy_from(slice, bytes); });
            });
}

int ClusterTransport::host_of_root(const Request& request) const {
  if (!collective(request.kind).has_root) return -1;
  const int root = number_in_set(request.root);
  int host = 0;
  while (partner(root, host) != root) ++host;
  return host;
}

// The factors of a host's sum, and of the sum over all hosts. A host's sum is rounded to the dtype
// before it is sent, and in half precision it could overflow where the result does not. So
// sums and averages are scaled as early as they can be, and averages divided by as much as keeps
// every intermediate sum within the range of its terms. (Divided by the number of all ranks at
// once, small gradients would become 0.)
std::pair<Factors, Factors> ClusterTransport::factors_of_stages(const Request& request, DType dtype,
                                                                Allreduce algorithm) const {
  Factors within, between = factors_of(request, size());
  std::swap(within.prescale, between.prescale);
  const bool average = request.reduction == Reduction::average;
  if (size_of(dtype) > 2 || (!average && request.reduction != Reduction::sum))
    return {within, between};
  std::swap(within.postscale, between.postscale);
  if (average) {
    within.divisor = most_local_ * most_rounded(algorithm, hosts_);
    between.divisor /= within.divisor;
  }
  return {within, between};
}

// Sums this leader's slice of a chunk within the host and starts its allreduce between hosts.
void ClusterTransport::start_inter_host(const Request& request, DType dtype, int64_t elements,
                                        uint64_t chunk) {
  const int64_t begin = elements * local_rank_ / leaders_;
  const int64_t end = elements * (local_rank_ + 1) / leaders_;
  std::vector<const void*> sources;
  for (int r = 0; r < local_size_; ++r) sources.push_back(slot(r, chunk) + begin * size_of(dtype));
  char* sum = slot(local_rank_, chunk) + begin * size_of(dtype);
  // As of sums that travel with the proposals: the bits must not depend on that.
  Slice slice = {sum, end - begin, dtype, request.reduction, {}, host_of_root(request)};
  const auto [within, between] = factors_of_stages(
      request, dtype, is_gathered(slice, hosts_) ? Allreduce::direct : algorithm_);
  slice.factors = between;
  loops().reduce(dtype, request.reduction, within, sources.data(), local_size_, end - begin, sum);
  start_inter_host(slice, chunk);
}

void ClusterTransport::start_inter_host(const Slice& slice, uint64_t chunk) {
  in_flight_.push_back(new_inter_host_allreduce(algorithm_, across_, slice, tag_of(chunk)));
}

}  // namespace hvd
