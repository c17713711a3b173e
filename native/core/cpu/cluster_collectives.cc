// What ClusterTransport does besides allreduce and broadcast.
#include <algorithm>
#include <cstring>
#include <functional>

#include "core/cpu/cluster_transport.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

// With more ranks, a piece of a reducescatter for each would be a short message, and with more
// hosts one of an allgather; those of MpiTransport are longer.
constexpr int kManyRanks = 256, kManyHosts = 256;

// Pieces of at most so many bytes are gathered as small ones: each would be a message to each host.
// Longer ones do not go to partners in shorter pieces than that.
constexpr int64_t kShortBytes = 512;

// In so many chunks, at most, are small pieces gathered.
constexpr int64_t kMostChunks = 64;

// Differs from the tags of MpiTransport's messages.
constexpr int kTag = 1;

// The messages of one chunk between this rank and its partners on other hosts. Each pair of ranks
// has one message each way per chunk at most, in the order of the chunks, so that one tag is
// enough.
class ChunkMessages : public InterHostExchange {
 public:
  // `bytes`: of memory that lasts as long as the messages.
  ChunkMessages(MPI_Comm all, int64_t bytes) : InterHostExchange(all), memory_(bytes) {}

  using Messages::receive;
  using Messages::send;

  char* memory() { return memory_.data(); }
  void when_complete(std::function<void()> then) { then_ = std::move(then); }

  bool advance() override {
    if (done_ || !all_complete()) return false;
    if (then_) then_();
    return done_ = true;
  }

 private:
  std::vector<char> memory_;
  std::function<void()> then_;
};

}  // namespace

// The rank of a host that exchanges with a rank; on its own host that rank itself.
int ClusterTransport::partner(int rank, int host) const {
  const std::vector<int>& there = by_host_[host];
  return there[place_[rank] % there.size()];
}

// The ranks whose partner on this host is a rank of it, that rank included.
std::vector<int> ClusterTransport::partners(int local_rank) const {
  const std::vector<int>& here = by_host_[host_];
  std::vector<int> found;
  for (int r = 0; r < size(); ++r)
    if (partner(r, host_) == here[local_rank]) found.push_back(r);
  return found;
}

// Chunk by chunk, each with a piece for each rank:
//
//   pack    this rank's pieces ──> its slot
//   reduce  the host's slots ──> the host's sum of a piece, by the partner of its owner, who sends
//           it there
//   reduce  the hosts' sums ──> output, by the owner, in the hosts' order: the bits of an allreduce
//           by direct messages
void ClusterTransport::reducescatter(const Request& request, size_t i) {
  if (size() > kManyRanks) return mpi_->reducescatter(request, i);
  const DType dtype = request.inputs[i].dtype;
  const int64_t width = size_of(dtype);
  const std::vector<int64_t> begin = scattered(request.inputs[i], size());
  const char* in = static_cast<const char*>(request.inputs[i].data);
  char* out = static_cast<char*>(request.outputs[i]);
  make_room(begin[1] * size());  // rank 0 gets the most rows
  const int64_t room = chunk_bytes_ / size() / kWidest * kWidest;
  const auto start = [&, first = chunks_](uint64_t chunk) {
    return static_cast<int64_t>(chunk - first) * room;
  };
  const auto length = [&](int r, uint64_t chunk) {
    return std::clamp<int64_t>(begin[r + 1] - begin[r] - start(chunk), 0, room);
  };
  const std::vector<int> owners = partners(local_rank_);
  const std::pair<Factors, Factors> factors = factors_of_stages(request, dtype, Allreduce::direct);

  std::vector<const void*> sources(local_size_), of_hosts(hosts_);

  // A piece for each host's sum of this rank's, and one for each other owner.
  const auto exchange = [&](uint64_t chunk) {
    auto messages = std::make_unique<ChunkMessages>(
        mpi_->communicator(), room * static_cast<int64_t>(hosts_ + owners.size() - 1));
    char* const sums = messages->memory();
    const int64_t mine = length(rank(), chunk);
    for (int h = 0; h < hosts_; ++h)
      if (h != host_) messages->receive(sums + h * room, mine, partner(rank(), h), kTag);
    int64_t place = hosts_;
    for (int owner : owners) {
      for (int r = 0; r < local_size_; ++r) sources[r] = slot(r, chunk) + owner * room;
      char* const sum = sums + (owner == rank() ? host_ : place++) * room;
      const int64_t bytes = length(owner, chunk);
      loops().reduce(dtype, request.reduction, factors.first, sources.data(), local_size_,
                     bytes / width, sum);
      if (owner != rank()) messages->send(sum, bytes, owner, kTag);
    }
    messages->when_complete([&, sums, mine, chunk] {
      for (int h = 0; h < hosts_; ++h) of_hosts[h] = sums + h * room;
      if (mine > 0)
        loops().reduce(dtype, request.reduction, factors.second, of_hosts.data(), hosts_,
                       mine / width, out + start(chunk));
    });
    in_flight_.push_back(std::move(messages));
  };

  in_chunks((begin[1] + room - 1) / room, local_size_,
            [&](uint64_t chunk) {
              for (int r = 0; r < size(); ++r) {
                if (const int64_t bytes = length(r, chunk); bytes > 0)
                  std::memcpy(slot(local_rank_, chunk) + r * room, in + begin[r] + start(chunk),
                              bytes);
              }
            },
            exchange, [](uint64_t) {});
}

// Chunk by chunk, each with a piece of each rank. Large pieces:
//
//   pack    this rank's piece ──> its slot and its partners' on other hosts, so that each host
//           gets each piece once
//   unpack  the host's slots ──> output
//
// Small ones:
//
//   pack    this rank's piece ──> its slot
//   gather  the host's pieces ──> those of all hosts, in the slot of its first rank, by that one
//   unpack  that slot ──> output
//
// Over MPI goes what would take too many messages: of very many hosts, of very uneven ones, or if
// /dev/shm is full.
void ClusterTransport::gather_bytes(const void* mine, const std::vector<int64_t>& sizes,
                                    void* all) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest == 0) return;
  const int64_t places = int64_t{most_local_} * hosts_;  // as if all hosts had as many ranks
  const bool small = longest * places <= kGatheredBytes ||
                     (longest <= kShortBytes && places <= 4 * int64_t{size()});
  if (!small && hosts_ > kManyHosts) return mpi_->gather_bytes(mine, sizes, all);
  std::vector<std::vector<int>> in_slot(small ? 1 : local_size_);  // whose pieces; -1: nobody's
  for (int c = 0; c < local_size_ && !small; ++c) in_slot[c] = partners(c);
  for (int h = 0; h < hosts_ && small; ++h) {
    in_slot[0].insert(in_slot[0].end(), by_host_[h].begin(), by_host_[h].end());
    in_slot[0].resize((h + 1) * most_local_, -1);
  }
  // In the fullest slot: that of the first rank of the smallest host.
  int64_t pieces = 0;
  for (const std::vector<int>& host : by_host_)
    pieces += small ? most_local_ : (static_cast<int64_t>(host.size()) + leaders_ - 1) / leaders_;
  make_room(longest * pieces);
  const int64_t most = small ? std::min(chunk_bytes_, kGatheredBytes) : chunk_bytes_;
  const int64_t fits = std::min(most / pieces, longest);
  if (fits == 0 || (small ? longest > kMostChunks * fits : fits < std::min(longest, kShortBytes)))
    return mpi_->gather_bytes(mine, sizes, all);
  const int64_t count = (longest + fits - 1) / fits;
  const int64_t room = (longest + count - 1) / count;  // equal, as a short one would be padded
  const auto start = [&, first = chunks_](uint64_t chunk) {
    return static_cast<int64_t>(chunk - first) * room;
  };
  const auto length = [&](int r, uint64_t chunk) {
    return std::clamp<int64_t>(sizes[r] - start(chunk), 0, room);
  };
  std::vector<int64_t> begin(size(), 0);
  for (int r = 1; r < size(); ++r) begin[r] = begin[r - 1] + sizes[r - 1];

  const auto pack = [&](uint64_t chunk, char* place) {
    if (const int64_t bytes = length(rank(), chunk); bytes > 0)
      std::memcpy(place, static_cast<const char*>(mine) + start(chunk), bytes);
  };
  const auto exchange = [&](uint64_t chunk) {
    auto messages = std::make_unique<ChunkMessages>(mpi_->communicator(), 0);
    char* place = slot(local_rank_, chunk);
    for (int r : in_slot[local_rank_]) {
      const int64_t bytes = length(r, chunk);
      if (r != rank()) {
        messages->receive(place, bytes, r, kTag);
      } else {
        pack(chunk, place);
        for (int h = 0; h < hosts_; ++h)
          if (h != host_) messages->send(place, bytes, partner(rank(), h), kTag);
      }
      place += room;
    }
    in_flight_.push_back(std::move(messages));
  };
  const auto gather = [&](uint64_t chunk) {
    const int64_t of_host = most_local_ * room;
    std::vector<char> of_this(of_host);
    for (int r = 0; r < local_size_; ++r)
      std::memcpy(of_this.data() + r * room, slot(r, chunk), room);
    in_flight_.push_back(std::make_unique<Gathered>(
        across_, of_this.data(), of_host, tag_of(chunk), [=](const Gathered& gathered) {
          for (int h = 0; h < hosts_; ++h)
            std::memcpy(slot(0, chunk) + h * of_host, gathered.along(h), of_host);
        }));
  };
  const auto unpack = [&](uint64_t chunk) {
    for (int c = 0; c < static_cast<int>(in_slot.size()); ++c) {
      const char* piece = slot(c, chunk);
      for (int r : in_slot[c]) {
        if (const int64_t bytes = r < 0 ? 0 : length(r, chunk); bytes > 0)
          std::memcpy(static_cast<char*>(all) + begin[r] + start(chunk), piece, bytes);
        piece += room;
      }
    }
  };
  if (small) {
    in_chunks(
        count, 1, [&](uint64_t chunk) { pack(chunk, slot(local_rank_, chunk)); }, gather, unpack);
  } else {
    in_chunks(count, local_size_, exchange, [](uint64_t) {}, unpack);
  }
}

}  // namespace hvd
