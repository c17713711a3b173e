// What ClusterTransport does besides allreduce.
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "core/cpu/cluster_transport.h"
#include "core/cpu/mpi_error.h"
#include "core/math/loops.h"

namespace hvd {
namespace {

constexpr int64_t kWidest = 8;  // bytes of the widest dtype

// Differs from the tag of MpiTransport's messages.
constexpr int kTag = 1;

// The messages of one chunk between this rank and its partners on other hosts. Each pair of ranks
// has one message per chunk at most, in the order of the chunks, so that one tag is enough.
class Messages : public InterHostExchange {
 public:
  // `bytes`: of memory that lasts as long as the messages.
  Messages(MPI_Comm all, int64_t bytes) : all_(all), memory_(bytes) {}

  char* memory() { return memory_.data(); }
  void send(const char* data, int64_t bytes, int to) {
    if (bytes > 0)
      HVD_MPI(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kTag, all_, add()));
  }
  void receive(char* data, int64_t bytes, int from) {
    if (bytes > 0)
      HVD_MPI(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kTag, all_, add()));
  }
  void when_complete(std::function<void()> then) { then_ = std::move(then); }

  bool advance() override {
    if (done_) return false;
    int complete = 0;
    HVD_MPI(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                        MPI_STATUSES_IGNORE));
    if (!complete) return false;
    if (then_) then_();
    return done_ = true;
  }

 private:
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  MPI_Comm all_;
  std::vector<char> memory_;
  std::vector<MPI_Request> requests_;
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
Status ClusterTransport::reducescatter(Request& request, const Waiting& waiting) {
  Status status = allocate_scattered(request, rank(), size());
  if (status = mpi_->agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < request.inputs.size(); ++i) reduce_to_owners(request, i, waiting);
  return {};
}

void ClusterTransport::reduce_to_owners(const Request& request, size_t i, const Waiting& waiting) {
  const Input& input = request.inputs[i];
  Shape row = input.shape;
  row[0] = 1;
  const DType dtype = input.dtype;
  const int64_t width = static_cast<int64_t>(size_of(dtype)), of_row = elements(row);
  const auto begin = [&](int r) { return first_row(input.shape[0], r, size()) * of_row * width; };
  const char* in = static_cast<const char*>(input.data);
  char* out = static_cast<char*>(request.outputs[i]);
  make_room(begin(1) * size(), waiting);
  const int64_t room = chunk_bytes_ / size() / kWidest * kWidest;
  const uint64_t first = chunks_;
  chunks_ += (begin(1) + room - 1) / room;  // rank 0 gets the most rows
  const auto start = [&](uint64_t chunk) { return static_cast<int64_t>(chunk - first) * room; };
  const auto length = [&](int r, uint64_t chunk) {
    return std::clamp<int64_t>(begin(r + 1) - begin(r) - start(chunk), 0, room);
  };
  const std::vector<int> owners = partners(local_rank_);
  const Reduction reduction = request.reduction;
  const std::pair<Factors, Factors> factors = factors_of_stages(request, dtype, Allreduce::direct);

  // A piece for each host's sum of this rank's, and one for each other owner.
  const auto exchange = [&](uint64_t chunk) {
    auto messages = std::make_unique<Messages>(
        mpi_->communicator(), room * static_cast<int64_t>(hosts_ + owners.size() - 1));
    char* const sums = messages->memory();
    const int64_t mine = length(rank(), chunk);
    for (int h = 0; h < hosts_; ++h)
      if (h != host_) messages->receive(sums + h * room, mine, partner(rank(), h));
    int64_t place = hosts_;
    std::vector<const void*> sources(local_size_);
    for (int owner : owners) {
      for (int r = 0; r < local_size_; ++r) sources[r] = slot(r, chunk) + owner * room;
      char* const sum = sums + (owner == rank() ? host_ : place++) * room;
      const int64_t bytes = length(owner, chunk);
      loops().reduce(dtype, reduction, factors.first, sources.data(), local_size_, bytes / width,
                     sum);
      if (owner != rank()) messages->send(sum, bytes, owner);
    }
    char* const result = out + start(chunk);
    messages->when_complete([this, dtype, reduction, factors, sums, room, mine, width, result] {
      std::vector<const void*> sources(hosts_);
      for (int h = 0; h < hosts_; ++h) sources[h] = sums + h * room;
      if (mine > 0)
        loops().reduce(dtype, reduction, factors.second, sources.data(), hosts_, mine / width,
                       result);
    });
    in_flight_.push_back(std::move(messages));
  };

  HostCounters& counters = memory_->counters();
  uint64_t packed = first, started = first, finished = first;
  MpiWaiter::Wait wait(mpi_->waiter(), waiting);
  wait.check();
  while (finished < chunks_) {
    bool progressed = false;
    if (packed < chunks_ && packed < counters.least(HostCounters::unpacked) + kWindow) {
      for (int r = 0; r < size(); ++r) {
        if (const int64_t bytes = length(r, packed); bytes > 0)
          std::memcpy(slot(local_rank_, packed) + r * room, in + begin(r) + start(packed), bytes);
      }
      counters.advance(HostCounters::packed, ++packed);
      progressed = true;
    }
    if (started < counters.least(HostCounters::packed) && in_flight_.size() < kWindow) {
      exchange(started++);
      counters.advance(HostCounters::reduced, started);
      counters.advance(HostCounters::unpacked, started);  // this rank has read the slots
      progressed = true;
    }
    progressed |= advance_in_flight([&] { ++finished; });
    wait.turn(progressed);
  }
}

// Chunk by chunk, each with a piece of each rank:
//
//   pack    this rank's piece ──> its slot and its partners' on other hosts, so that each host
//           gets each piece once
//   unpack  the host's slots ──> output
Status ClusterTransport::allgather(Request& request, const Waiting& waiting) {
  std::vector<int64_t> my_rows, rows;
  for (const Input& input : request.inputs) my_rows.push_back(input.shape[0]);
  mpi_->gather_numbers(my_rows, &rows);
  std::vector<std::vector<int64_t>> sizes;
  Status status = allocate_gathered(request, rows, size(), &sizes);
  if (status = mpi_->agree_on(status, request); !status.ok()) return status;
  for (size_t i = 0; i < sizes.size(); ++i) {
    share(static_cast<const char*>(request.inputs[i].data), sizes[i],
          static_cast<char*>(request.outputs[i]), waiting);
  }
  return {};
}

void ClusterTransport::share(const char* mine, const std::vector<int64_t>& sizes, char* all,
                             const Waiting& waiting) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  // The pieces in the fullest slot: that of the first rank of the smallest host.
  int64_t pieces = 0;
  for (const std::vector<int>& host : by_host_)
    pieces += (static_cast<int64_t>(host.size()) + leaders_ - 1) / leaders_;
  make_room(longest * pieces, waiting);
  const int64_t room = chunk_bytes_ / pieces / kWidest * kWidest;
  const uint64_t first = chunks_;
  chunks_ += (longest + room - 1) / room;
  const auto length = [&](int r, uint64_t chunk) {
    return std::clamp<int64_t>(sizes[r] - static_cast<int64_t>(chunk - first) * room, 0, room);
  };
  std::vector<int64_t> begin(size(), 0);
  for (int r = 1; r < size(); ++r) begin[r] = begin[r - 1] + sizes[r - 1];
  std::vector<std::vector<int>> in_slot;  // whose pieces, by rank of this host
  for (int c = 0; c < local_size_; ++c) in_slot.push_back(partners(c));

  const auto exchange = [&](uint64_t chunk) {
    auto messages = std::make_unique<Messages>(mpi_->communicator(), 0);
    char* place = slot(local_rank_, chunk);
    for (int r : in_slot[local_rank_]) {
      const int64_t bytes = length(r, chunk);
      if (r != rank()) {
        messages->receive(place, bytes, r);
      } else if (bytes > 0) {
        std::memcpy(place, mine + static_cast<int64_t>(chunk - first) * room, bytes);
        for (int h = 0; h < hosts_; ++h)
          if (h != host_) messages->send(place, bytes, partner(rank(), h));
      }
      place += room;
    }
    in_flight_.push_back(std::move(messages));
  };

  HostCounters& counters = memory_->counters();
  uint64_t packed = first, arrived = first, unpacked = first;
  MpiWaiter::Wait wait(mpi_->waiter(), waiting);
  wait.check();
  while (unpacked < chunks_) {
    bool progressed = false;
    if (packed < chunks_ && packed < counters.least(HostCounters::unpacked) + kWindow) {
      exchange(packed++);
      counters.advance(HostCounters::packed, packed);
      progressed = true;
    }
    progressed |= advance_in_flight([&] { counters.advance(HostCounters::reduced, ++arrived); });
    if (unpacked < counters.least(HostCounters::reduced)) {
      for (int c = 0; c < local_size_; ++c) {
        const char* piece = slot(c, unpacked);
        for (int r : in_slot[c]) {
          const int64_t start = static_cast<int64_t>(unpacked - first) * room;
          if (const int64_t bytes = length(r, unpacked); bytes > 0)
            std::memcpy(all + begin[r] + start, piece, bytes);
          piece += room;
        }
      }
      counters.advance(HostCounters::unpacked, ++unpacked);
      progressed = true;
    }
    wait.turn(progressed);
  }
}

}  // namespace hvd
