#include "core/cpu/cluster_transport.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/base/log.h"
#include "core/cpu/mpi_error.h"
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

// With more ranks, a piece for each would be a short message; those of MpiTransport are longer.
constexpr int kManyRanks = 256;

}  // namespace

ClusterTransport::ClusterTransport(std::unique_ptr<MpiTransport>* mpi, MPI_Comm host,
                                   Allreduce algorithm)
    : algorithm_(algorithm), chunk_bytes_(kSmallBytes) {
  HVD_MPI(MPI_Comm_rank(host, &local_rank_));
  HVD_MPI(MPI_Comm_size(host, &local_size_));
  const MPI_Comm all = (*mpi)->communicator();
  // Messages of different algorithms would not match.
  HVD_MPI(MPI_Bcast(&algorithm_, sizeof algorithm_, MPI_BYTE, 0, all));
  std::vector<int> neighbours(local_size_);
  const int own = (*mpi)->ranks()[(*mpi)->rank()];
  HVD_MPI(MPI_Allgather(&own, 1, MPI_INT, neighbours.data(), 1, MPI_INT, host));
  HVD_MPI(MPI_Allreduce(&local_size_, &leaders_, 1, MPI_INT, MPI_MIN, all));
  HVD_MPI(MPI_Allreduce(&local_size_, &most_local_, 1, MPI_INT, MPI_MAX, all));
  hosts_ = local_rank_ == 0 ? 1 : 0;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &hosts_, 1, MPI_INT, MPI_SUM, all));
  algorithm_ = algorithm_for(algorithm_, hosts_);
  full_chunk_bytes_ =
      std::clamp(kMessageBytes * leaders_ * hosts_, kLeastChunkBytes, kMostChunkBytes);

  std::string why;
  try {
    const SharedMemory::Area slot = {full_chunk_bytes_ + kGapBytes, kSmallBytes};
    memory_ = std::make_unique<SharedMemory>(host, neighbours,
                                             std::vector<SharedMemory::Area>(kWindow, slot));
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  int failed = why.empty() ? 0 : 1;
  HVD_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, all));
  if (failed) throw std::runtime_error(why.empty() ? "those of another host cannot" : why);
  number_hosts(all, neighbours[0]);
  // By the number of the host, so that all slices are summed in the same order.
  HVD_MPI(
      MPI_Comm_split(all, local_rank_ < leaders_ ? local_rank_ : MPI_UNDEFINED, host_, &across_));
  mpi_ = std::move(*mpi);
}

// `first`: the number in the job of the first rank of this host.
void ClusterTransport::number_hosts(MPI_Comm all, int first) {
  int ranks = 0;
  HVD_MPI(MPI_Comm_size(all, &ranks));
  std::vector<int> firsts(ranks), numbers;
  HVD_MPI(MPI_Allgather(&first, 1, MPI_INT, firsts.data(), 1, MPI_INT, all));
  for (int r = 0; r < ranks; ++r) {
    const auto found = std::find(numbers.begin(), numbers.end(), firsts[r]);
    const size_t host = found - numbers.begin();
    if (found == numbers.end()) {
      numbers.push_back(firsts[r]);
      by_host_.emplace_back();
    }
    if (firsts[r] == first) host_ = static_cast<int>(host);
    place_.push_back(static_cast<int>(by_host_[host].size()));
    by_host_[host].push_back(r);
  }
}

ClusterTransport::~ClusterTransport() {
  if (across_ != MPI_COMM_NULL) HVD_MPI(MPI_Comm_free(&across_));
}

char* ClusterTransport::slot(int local_rank, uint64_t chunk) const {
  return memory_->area(local_rank, chunk % kWindow);
}

Status ClusterTransport::run(Request& request, const Waiting& waiting) {
  const bool few = size() <= kManyRanks;
  const bool scatters = request.kind == Kind::reducescatter && few;
  const bool gathers = request.kind == Kind::allgather && few;
  const bool reduces = request.kind == Kind::allreduce && request.reduction != Reduction::adasum;
  if (!scatters && !gathers && !reduces) return mpi_->run(request, waiting);
  mpi_->begin(waiting);
  if (scatters) return reducescatter(request, waiting);
  if (gathers) return allgather(request, waiting);
  for (DTypeGroup& group : by_dtype(request)) allreduce(request, group, waiting);
  return {};
}

// Commits whole slots before the first request that is larger than what is committed. `bytes` is
// equal on all ranks. If a rank cannot commit its slots, the ranks of all hosts go on with what
// they have: their messages must match.
void ClusterTransport::make_room(int64_t bytes, const Waiting& waiting) {
  if (bytes <= chunk_bytes_ || asked_for_room_) return;
  asked_for_room_ = true;
  const std::vector<std::string> done = mpi_->gather(memory_->commit() ? "yes" : "no", waiting);
  if (std::count(done.begin(), done.end(), "yes") == size()) {
    chunk_bytes_ = full_chunk_bytes_;
  } else if (rank() == 0) {
    log(LogLevel::warning, no_room_text(chunk_bytes_));
  }
}

void ClusterTransport::allreduce(const Request& request, DTypeGroup& group,
                                 const Waiting& waiting) {
  const int64_t width = static_cast<int64_t>(size_of(group.dtype)), total = group.in.left();
  make_room(total, waiting);
  const uint64_t first = chunks_;
  chunks_ += (total + chunk_bytes_ - 1) / chunk_bytes_;
  const auto elements = [&](uint64_t chunk) {
    const int64_t before = static_cast<int64_t>(chunk - first) * chunk_bytes_;
    return std::min(chunk_bytes_, total - before) / width;
  };
  const bool leads = local_rank_ < leaders_;
  HostCounters& counters = memory_->counters();
  uint64_t packed = first, started = first, reduced = first, unpacked = first;

  const auto step = [&] {
    bool progressed = false;
    if (packed < chunks_ && packed < counters.least(HostCounters::unpacked) + kWindow) {
      group.in.copy_to(slot(local_rank_, packed), elements(packed) * width);
      counters.advance(HostCounters::packed, ++packed);
      progressed = true;
    }
    if (leads && started < counters.least(HostCounters::packed)) {
      start_inter_host(request, group.dtype, elements(started), started);
      ++started;
      progressed = true;
    }
    progressed |= advance_in_flight([&] { counters.advance(HostCounters::reduced, ++reduced); });
    if (unpacked < counters.least(HostCounters::reduced, leaders_)) {
      for (int c = 0; c < leaders_; ++c) {
        const int64_t n = elements(unpacked), begin = n * c / leaders_ * width;
        group.out.copy_from(slot(c, unpacked) + begin, n * (c + 1) / leaders_ * width - begin);
      }
      counters.advance(HostCounters::unpacked, ++unpacked);
      progressed = true;
    }
    return progressed;
  };
  MpiWaiter::Wait wait(mpi_->waiter(), waiting);
  wait.check();
  while (unpacked < chunks_) wait.turn(step());
}

// Lets messages between hosts progress, and calls `completed` for each chunk whose messages have
// completed, in the chunks' order. Returns whether there was progress.
bool ClusterTransport::advance_in_flight(const std::function<void()>& completed) {
  bool progressed = false;
  for (const auto& messages : in_flight_) progressed |= messages->advance();
  while (!in_flight_.empty() && in_flight_.front()->done()) {
    in_flight_.pop_front();
    completed();
    progressed = true;
  }
  return progressed;
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
  for (int r = 0; r < local_size_; ++r)
    sources.push_back(slot(r, chunk) + begin * static_cast<int64_t>(size_of(dtype)));
  char* sum = slot(local_rank_, chunk) + begin * static_cast<int64_t>(size_of(dtype));
  const auto [within, between] = factors_of_stages(request, dtype, algorithm_);
  loops().reduce(dtype, request.reduction, within, sources.data(), local_size_, end - begin, sum);
  in_flight_.push_back(new_inter_host_allreduce(
      algorithm_, across_, {sum, end - begin, dtype, request.reduction, between},
      static_cast<int>(2 * (chunk % kWindow))));
}

}  // namespace hvd
