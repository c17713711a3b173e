#include "core/cpu/host_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/math/loops.h"
#include "core/math/send.h"

namespace hvd {
namespace {

// How many chunks a rank may be ahead of the slowest.
constexpr uint64_t kWindow = 4;

// A rank sums so many bytes of its slice at once: its sums are still in the first-level cache when
// they are copied to where they go.
constexpr int64_t kBlockBytes = 32 << 10;

// An allreduce of at most so many bytes may be run by the thread that submits it: it takes little
// longer than to wake the engine's thread and to be woken by it.
constexpr uint64_t kMostAtOnce = 1 << 20;

// What travels with proposals, at most, for two ranks: with more, each rank has more to read.
constexpr int64_t kMostAlong = 64 << 10;
constexpr int64_t kHeadBytes = 64;

// The tensors that travel along alternate between so many places in the slots of chunks, whose
// bytes together do not fit into a second-level cache: from there another core would get them much
// more slowly than from the cache behind.
constexpr int64_t kPlacesPerSlot = HostTransport::kChunkBytes / kMostAlong;
constexpr uint64_t kPlaces = kPlacesPerSlot * kWindow;

// Padding, so that the slots of all ranks do not map to the same cache sets.
constexpr int64_t kGapBytes = 4096;

// Of each slot, what is committed from the start.
constexpr int64_t kFrontBytes = 8 << 10;

std::vector<SharedMemory::Area> areas(int64_t small_bytes) {
  std::vector<SharedMemory::Area> areas(2, {kMostAlong + kGapBytes, small_bytes + kGapBytes});
  areas.resize(2 + kWindow, {HostTransport::kChunkBytes + kGapBytes, kFrontBytes});
  return areas;
}

}  // namespace

HostTransport::HostTransport(std::unique_ptr<MpiTransport>* mpi)
    : memory_((*mpi)->communicator(), (*mpi)->ranks(), areas(kSmallBytes)),
      chunk_bytes_(kFrontBytes),
      mpi_(std::move(*mpi)) {}

HostTransport::HostTransport(char* memory, std::unique_ptr<Transport> instead_of_mpi)
    : memory_(memory, instead_of_mpi->rank(), instead_of_mpi->ranks(), areas(kSmallBytes)),
      chunk_bytes_(kFrontBytes),
      mpi_(std::move(instead_of_mpi)) {}

int64_t HostTransport::memory_bytes(int ranks) {
  return SharedMemory::bytes(ranks, areas(kSmallBytes));
}

char* HostTransport::small_slot(int rank, uint64_t step) const {
  return memory_.area(rank, step % 2);
}

char* HostTransport::slot(int rank, uint64_t chunk) const {
  return memory_.area(rank, 2 + chunk % kWindow);
}

// The slots belong to chunks, which counters guard, or to barriers. Who goes from the one to the
// other without an agreement between must wait until all ranks have read what is in them.
void HostTransport::use_slots(SlotUse use) {
  if (slot_use_ != SlotUse::none && slot_use_ != use) barrier();
  slot_use_ = use;
}

std::optional<DTypeGroup> HostTransport::to_send_along(const Request& request) const {
  const bool room = chunk_bytes_ == kChunkBytes;
  return small_group(request, room ? std::max(kMostAlong * 2 / size(), kSmallBytes) : kSmallBytes);
}

// What a rank puts into its small slot for an agreement.
struct HostTransport::Head {
  Proposal proposal;
  uint64_t in_slots;  // 1: the tensors are in a place of the slots, 0: they follow
};

void HostTransport::propose(const Proposal& mine, std::optional<DTypeGroup> along) {
  static_assert(sizeof(Head) <= kHeadBytes);
  proposal_step_ = memory_.step();
  along_ = std::move(along);
  // Slower ranks may still read the slots of the last request.
  const bool in_slots = along_ && chunk_bytes_ == kChunkBytes && slot_use_ != SlotUse::barriers &&
                        memory_.counters().least(HostCounters::unpacked) == chunks_;
  const Head head = {mine, in_slots};
  std::memcpy(small_slot(rank(), proposal_step_), &head, sizeof head);
  if (along_) along_->in.send_to(sent_along(rank(), in_slots), along_->in.left());
  memory_.arrive();
  proposed_ = true;
}

// Where a rank puts the tensors that go with its proposal.
char* HostTransport::sent_along(int rank, bool in_slots) const {
  if (!in_slots) return small_slot(rank, proposal_step_) + kHeadBytes;
  const uint64_t place = proposal_step_ % kPlaces;
  return slot(rank, place / kPlacesPerSlot) + place % kPlacesPerSlot * kMostAlong;
}

Summary HostTransport::read_proposals() {
  Summary all;
  sources_.resize(size());
  for (int r = 0; r < size(); ++r) {
    Head head;
    std::memcpy(&head, small_slot(r, proposal_step_), sizeof head);
    all.add(Summary(head.proposal, r));
    sources_[r] = sent_along(r, head.in_slots);
  }
  proposed_ = false;
  slot_use_ = SlotUse::none;
  if (all.least != all.most) along_.reset();
  return all;
}

std::optional<Summary> HostTransport::agree(const Proposal& mine, const Request* next,
                                            const Waiting& waiting) {
  const bool at_once = !waiting;
  if (at_once &&
      (!adds_up(next->kind) || next->device != kOnHost || input_bytes(*next) > kMostAtOnce))
    return {};
  if (!proposed_) propose(mine, next ? to_send_along(*next) : std::nullopt);
  const HostCounters::Targets all_here = memory_.all_here();
  HostCounters& counters = memory_.counters();
  if (at_once && (!counters.wait_briefly(all_here) || counters.aborted())) return {};
  if (!at_once) {
    waiting_ = waiting;
    counters.wait(all_here, waiting);
    counters.check_aborted();  // by a rank that had come, but no longer waits
  }
  return read_proposals();
}

// One dtype of an allreduce on its way through the slots.
class HostTransport::Window {
 public:
  Window(HostTransport& host, const Request& request, DTypeGroup& group)
      : host_(host),
        counters_(host.memory_.counters()),
        request_(request),
        dtype_(group.dtype),
        width_(size_of(group.dtype)),
        total_(group.in.left()),
        gets_sums_(host.gets_sums(request)),
        gives_sums_(request.kind != Kind::reduce || !gets_sums_),
        first_(host.chunks_),
        end_(first_ + (total_ + host.chunk_bytes_ - 1) / host.chunk_bytes_),
        others_in_(group.in),
        own_in_(std::move(group.in)),
        others_out_(group.out),
        own_out_(std::move(group.out)),
        sources_(host.size()) {
    host.chunks_ = end_;
  }

  void run() {
    while (unpacked_ < end_) {
      if (unpacked_ < (gets_sums_ ? std::min(reduced_, all_reduced_) : reduced_)) {
        unpack();
      } else if (reduced_ < packed_ && reduced_ < all_packed_) {
        reduce();
      } else if (packed_ < end_ && packed_ < all_unpacked_ + kWindow) {
        pack();
      } else if (!look()) {
        wait();
      }
    }
  }

 private:
  // The bytes of a chunk, and where a rank's slice of it begins.
  int64_t bytes(uint64_t chunk) const {
    const int64_t before = static_cast<int64_t>(chunk - first_) * host_.chunk_bytes_;
    return std::min(host_.chunk_bytes_, total_ - before);
  }
  int64_t begin(uint64_t chunk, int rank) const {
    return bytes(chunk) / width_ * rank / host_.size() * width_;
  }
  int64_t length(uint64_t chunk, int rank) const {
    return begin(chunk, rank + 1) - begin(chunk, rank);
  }

  void pack() {
    for (int r = 0; r < host_.size(); ++r) {
      if (r == host_.rank()) {
        others_in_.skip(length(packed_, r));
      } else {
        others_in_.send_to(host_.slot(host_.rank(), packed_) + begin(packed_, r),
                           length(packed_, r));
      }
    }
    counters_.advance(HostCounters::packed, ++packed_);
  }

  void reduce() {
    const int rank = host_.rank();
    skip_to(own_in_, own_out_, 0, rank);
    const int64_t start = begin(reduced_, rank), end = begin(reduced_, rank + 1);
    for (int r = 0; r < host_.size(); ++r) sources_[r] = host_.slot(r, reduced_) + start;
    host_.sum_blocks(request_, dtype_, sources_, end - start, own_in_, own_out_,
                     gives_sums_ ? host_.slot(rank, reduced_) + start : nullptr);
    skip_to(own_in_, own_out_, rank + 1, host_.size());
    counters_.advance(HostCounters::reduced, ++reduced_);
  }

  // Over the slices of ranks of the chunk that is reduced.
  void skip_to(ByteCursor& in, ByteCursor& out, int from, int to) const {
    const int64_t bytes = begin(reduced_, to) - begin(reduced_, from);
    in.skip(bytes);
    out.skip(bytes);
  }

  void unpack() {
    for (int r = 0; r < host_.size() && gets_sums_; ++r) {
      if (r == host_.rank()) {
        others_out_.skip(length(unpacked_, r));
      } else {
        others_out_.copy_from(host_.slot(r, unpacked_) + begin(unpacked_, r), length(unpacked_, r));
      }
    }
    counters_.advance(HostCounters::unpacked, ++unpacked_);
  }

  // Reads the others' counters; false if there is nothing new.
  bool look() {
    const uint64_t before = all_packed_ + all_reduced_ + all_unpacked_;
    all_packed_ = counters_.least(HostCounters::packed);
    all_reduced_ = counters_.least(HostCounters::reduced);
    all_unpacked_ = counters_.least(HostCounters::unpacked);
    return all_packed_ + all_reduced_ + all_unpacked_ != before;
  }

  // For what only the others lack, so that those named at the deadline are to blame.
  void wait() {
    HostCounters::Targets targets = HostCounters::kNone;
    if (unpacked_ < reduced_) targets[HostCounters::reduced] = unpacked_ + 1;
    if (reduced_ < packed_) targets[HostCounters::packed] = reduced_ + 1;
    if (packed_ < end_ && packed_ < unpacked_ + kWindow)
      targets[HostCounters::unpacked] = packed_ + 1 - kWindow;
    counters_.wait(targets, host_.waiting_);
  }

  HostTransport& host_;
  HostCounters& counters_;
  const Request& request_;
  const DType dtype_;
  const int64_t width_, total_;
  const bool gets_sums_, gives_sums_;
  const uint64_t first_, end_;  // chunks
  uint64_t packed_ = first_, reduced_ = first_, unpacked_ = first_;
  uint64_t all_packed_ = first_, all_reduced_ = first_;
  // Others may still read the slots of the group before this one.
  uint64_t all_unpacked_ = counters_.least(HostCounters::unpacked);
  ByteCursor others_in_, own_in_, others_out_, own_out_;
  std::vector<char*> sources_;
};

void HostTransport::allreduce(Request& request) {
  if (along_) {
    sum_all(request, *along_);
    along_.reset();
    return;
  }
  for (DTypeGroup& group : by_dtype(request)) {
    if (group.in.left() <= kSmallBytes) {
      reduce_small(request, group);
    } else {
      make_room(group.in.left());
      use_slots(SlotUse::chunks);
      Window(*this, request, group).run();
    }
  }
}

void HostTransport::reduce_small(const Request& request, DTypeGroup& group) {
  const uint64_t step = memory_.step();
  group.in.send_to(small_slot(rank(), step), group.in.left());
  barrier();
  sources_.resize(size());
  for (int r = 0; r < size(); ++r) sources_[r] = small_slot(r, step);
  sum_all(request, group);
}

// Sums what all ranks have sent, from `sources_` on, into the output.
void HostTransport::sum_all(const Request& request, DTypeGroup& group) {
  if (!gets_sums(request)) return;
  group.in.rewind();
  sum_blocks(request, group.dtype, sources_, group.in.left(), group.in, group.out, nullptr);
}

// Sums `bytes` of all ranks, from `sources` on, in blocks; but those of this rank come from `in`,
// since its slot is not in its cache. They go to `out` and, unless it is null, to the slot `sent`.
void HostTransport::sum_blocks(const Request& request, DType dtype,
                               const std::vector<char*>& sources, int64_t bytes, ByteCursor& in,
                               ByteCursor& out, char* sent) {
  alignas(64) char room[kBlockBytes];
  const int64_t width = size_of(dtype);
  const Factors factors = factors_of(request, size());
  terms_.resize(size());
  for (int64_t at = 0; at < bytes;) {
    const ByteCursor::Block own = in.read(std::min(kBlockBytes, bytes - at), room);
    for (int r = 0; r < size(); ++r) terms_[r] = sources[r] + at;
    terms_[rank()] = own.data;
    char* const place = out.place(own.bytes);
    char* const sums = place ? place : room;
    loops().reduce(dtype, request.reduction, factors, terms_.data(), size(), own.bytes / width,
                   sums);
    if (sent) send(sums, own.bytes, sent + at);
    if (!place) out.copy_from(room, own.bytes);
    at += own.bytes;
  }
}

}  // namespace hvd
