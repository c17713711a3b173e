#include "core/cpu/inter_host.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/cpu/mpi_error.h"

namespace hvd {
namespace {

// From so many hosts on, the messages that a grid saves cost more than its two more latencies.
// Measured with up to 64 hosts (benchmarks/data/NOTES.md): the times are equal at 32.
constexpr int kManyHosts = 32;

// Messages between hosts; the slice is cut into parts.
class PointToPoint : public InterHostExchange {
 public:
  PointToPoint(MPI_Comm hosts, const Slice& slice, int tag, int parts)
      : slice_(slice),
        width_(static_cast<int64_t>(size_of(slice.dtype))),
        parts_(parts),
        hosts_(hosts),
        tag_(tag) {
    HVD_MPI(MPI_Comm_rank(hosts, &host_));
  }

 protected:
  int64_t begin(int part) const { return slice_.elements * part / parts_; }
  int64_t length(int part) const { return begin(part + 1) - begin(part); }
  char* data(int part) const { return slice_.data + begin(part) * width_; }

  // Both sides know how long a part is, so that empty ones need no message.
  void send(int part, int to, int stage) {
    if (length(part) > 0)
      HVD_MPI(MPI_Isend(data(part), bytes(part), MPI_BYTE, to, tag_ + stage, hosts_, add()));
  }
  void receive(int part, void* target, int from, int stage) {
    if (length(part) > 0)
      HVD_MPI(MPI_Irecv(target, bytes(part), MPI_BYTE, from, tag_ + stage, hosts_, add()));
  }
  bool all_complete() {
    int complete = 0;
    HVD_MPI(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                        MPI_STATUSES_IGNORE));
    if (complete) requests_.clear();
    return complete != 0;
  }
  void combine(int part, const std::vector<const void*>& sources, const Factors& factors) {
    loops().reduce(slice_.dtype, slice_.reduction, factors, sources.data(),
                   static_cast<int>(sources.size()), length(part), data(part));
  }

  const Slice slice_;
  const int64_t width_;
  const int parts_;
  const MPI_Comm hosts_;
  const int tag_;
  int host_ = 0;

 private:
  int bytes(int part) const { return static_cast<int>(length(part) * width_); }
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  std::vector<MPI_Request> requests_;
};

// Reduce-scatter, then allgather, each by direct messages between all pairs of some hosts: two
// latencies, whatever their number. Terms are added in the order of these hosts.
class Direct : public PointToPoint {
 public:
  // `peers`: those hosts, this one among them. The first `owners` of them sum a part each, all by
  // default, and pass on what they get from the same exchange of that sum with `beyond`, if not
  // empty.
  Direct(MPI_Comm hosts, std::vector<int> peers, const Slice& slice, int tag, int owners = 0,
         std::vector<int> beyond = {})
      : PointToPoint(hosts, slice, tag, owners > 0 ? owners : static_cast<int>(peers.size())),
        peers_(std::move(peers)),
        beyond_(std::move(beyond)),
        place_(static_cast<int>(std::find(peers_.begin(), peers_.end(), host_) - peers_.begin())) {
    if (owns(place_)) received_.resize(length(place_) * width_ * peers_.size());
    with_others([&](int p) {
      if (owns(place_)) receive(place_, of(p), peers_[p], 0);
    });
    with_others([&](int p) {
      if (owns(p)) send(p, peers_[p], 0);
    });
  }

  bool advance() override {
    if (done_) return false;
    if (between_ && !between_->done()) {
      const bool progressed = between_->advance();
      if (between_->done()) gather();
      return progressed;
    }
    if (!all_complete()) return false;
    if (gathering_) return done_ = true;
    gathering_ = true;
    if (owns(place_)) reduce();
    with_others([&](int p) {
      if (owns(p)) receive(p, data(p), peers_[p], 1);
    });
    if (!between_) gather();
    return true;
  }

 private:
  bool owns(int place) const { return place < parts_; }
  char* of(int place) { return received_.data() + place * length(place_) * width_; }

  void reduce() {
    std::vector<const void*> sources;
    for (int p = 0; p < static_cast<int>(peers_.size()); ++p)
      sources.push_back(p == place_ ? data(p) : of(p));
    combine(place_, sources, beyond_.empty() ? slice_.factors : Factors());
    if (beyond_.empty()) return;
    Slice sum = slice_;
    sum.data = data(place_);
    sum.elements = length(place_);
    between_ = std::make_unique<Direct>(hosts_, beyond_, sum, tag_);
  }

  void gather() {
    with_others([&](int p) {
      if (owns(place_)) send(place_, peers_[p], 1);
    });
  }

  // Each host starts with a different peer, so that no host receives from all at once.
  template <typename Visit>
  void with_others(const Visit& visit) const {
    const int count = static_cast<int>(peers_.size());
    for (int i = 1; i < count; ++i) visit((place_ + i) % count);
  }

  const std::vector<int> peers_, beyond_;
  const int place_;  // of this host among its peers
  std::vector<char> received_;
  std::unique_ptr<Direct> between_;
  bool gathering_ = false;
};

std::unique_ptr<Direct> new_direct(MPI_Comm hosts, const Slice& slice, int tag) {
  int count = 0;
  HVD_MPI(MPI_Comm_size(hosts, &count));
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return std::make_unique<Direct>(hosts, std::move(all), slice, tag);
}

// The hosts of a grid: groups of consecutive hosts, of which each has `columns` hosts or one more.
struct Groups {
  explicit Groups(int hosts) : hosts(hosts) {
    const int root = static_cast<int>(std::sqrt(hosts));
    columns = root;
    for (int c = root; c > root / 2; --c) {
      if (hosts % c != 0) continue;
      columns = c;  // so that all groups are equal
      break;
    }
    count = hosts / columns;
  }
  int first(int group) const { return static_cast<int>(int64_t{hosts} * group / count); }

  int hosts, columns, count;
};

// The direct exchange within groups of hosts, and of their sums between groups: four latencies, and
// some 4 sqrt(H) messages to as many hosts in place of 2(H - 1). Where groups differ in size, their
// leaders move up to (1 + 1/(2 sqrt(H))) times the least bytes.
std::unique_ptr<Direct> new_grid(MPI_Comm hosts, const Slice& slice, int tag) {
  int host = 0, count = 0, group = 0;
  HVD_MPI(MPI_Comm_rank(hosts, &host));
  HVD_MPI(MPI_Comm_size(hosts, &count));
  const Groups groups(count);
  while (groups.first(group + 1) <= host) ++group;
  const int first = groups.first(group);
  std::vector<int> peers(groups.first(group + 1) - first), beyond;
  std::iota(peers.begin(), peers.end(), first);
  for (int g = 0; g < groups.count; ++g) beyond.push_back(groups.first(g) + host - first);
  return std::make_unique<Direct>(hosts, std::move(peers), slice, tag, groups.columns,
                                  std::move(beyond));
}

}  // namespace

std::unique_ptr<InterHostExchange> new_inter_host_allreduce(Allreduce algorithm, MPI_Comm hosts,
                                                            const Slice& slice, int tag) {
  if (algorithm == Allreduce::grid) return new_grid(hosts, slice, tag);
  return new_direct(hosts, slice, tag);
}

int most_rounded(Allreduce algorithm, int hosts) {
  if (algorithm != Allreduce::grid) return 1;
  const Groups groups(hosts);
  return (hosts + groups.count - 1) / groups.count;
}

Allreduce algorithm_for(Allreduce asked, int hosts) {
  if (asked != Allreduce::automatic) return asked;
  return hosts < kManyHosts ? Allreduce::direct : Allreduce::grid;
}

}  // namespace hvd
