#include "core/cpu/inter_host.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace hvd {
namespace {

// From so many hosts on, the messages that a grid saves cost more than its two more latencies.
// Measured with up to 64 hosts (benchmarks/data/NOTES.md): the times are equal at 32.
constexpr int kManyHosts = 32;

// Reduce-scatter, then allgather, each by direct messages between all pairs of some hosts: two
// latencies, whatever their number. Terms are added in the order of these hosts.
class Direct : public InterHostExchange {
 public:
  // `peers`: those hosts, this one among them. The first `owners` of them sum a part each, all by
  // default, and pass on what they get from the same exchange of that sum with `beyond`, if not
  // empty.
  Direct(MPI_Comm hosts, std::vector<int> peers, const Slice& slice, int tag, int owners = 0,
         std::vector<int> beyond = {})
      : InterHostExchange(hosts),
        hosts_(hosts),
        slice_(slice),
        width_(size_of(slice.dtype)),
        parts_(owners > 0 ? owners : static_cast<int>(peers.size())),
        tag_(tag),
        peers_(std::move(peers)),
        beyond_(std::move(beyond)) {
    place_ =
        static_cast<int>(std::find(peers_.begin(), peers_.end(), rank_in(hosts)) - peers_.begin());
    others_ = others(place_, static_cast<int>(peers_.size()));
    if (owns(place_)) received_.resize(bytes(place_) * peers_.size());
    for (int p : others_)
      if (owns(place_)) receive(of(p), bytes(place_), peers_[p], tag_);
    for (int p : others_)
      if (owns(p)) send(data(p), bytes(p), peers_[p], tag_);
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
    for (int p : others_)
      if (owns(p) && gets_sums(place_)) receive(data(p), bytes(p), peers_[p], tag_ + 1);
    if (!between_) gather();
    return true;
  }

 private:
  bool gets_sums(int place) const { return slice_.root < 0 || peers_[place] == slice_.root; }
  bool owns(int place) const { return place < parts_; }
  int64_t begin(int part) const { return slice_.elements * part / parts_; }
  int64_t length(int part) const { return begin(part + 1) - begin(part); }
  int64_t bytes(int part) const { return length(part) * width_; }
  char* data(int part) const { return slice_.data + begin(part) * width_; }
  char* of(int place) { return received_.data() + place * bytes(place_); }

  void reduce() {
    std::vector<const void*> sources;
    for (int p = 0; p < static_cast<int>(peers_.size()); ++p)
      sources.push_back(p == place_ ? data(p) : of(p));
    loops().reduce(slice_.dtype, slice_.reduction, beyond_.empty() ? slice_.factors : Factors(),
                   sources.data(), static_cast<int>(sources.size()), length(place_), data(place_));
    if (beyond_.empty()) return;
    Slice sum = slice_;
    sum.data = data(place_);
    sum.elements = length(place_);
    between_ = std::make_unique<Direct>(hosts_, beyond_, sum, tag_);
  }

  void gather() {
    for (int p : others_)
      if (owns(place_) && gets_sums(p)) send(data(place_), bytes(place_), peers_[p], tag_ + 1);
  }

  const MPI_Comm hosts_;
  const Slice slice_;
  const int64_t width_;
  const int parts_;
  const int tag_;
  const std::vector<int> peers_, beyond_;
  int place_ = 0;  // of this host among its peers
  std::vector<int> others_;
  std::vector<char> received_;
  std::unique_ptr<Direct> between_;
  bool gathering_ = false;
};

std::vector<int> range(int first, int end) {
  std::vector<int> numbers(end - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// The hosts of a grid: groups of consecutive hosts, of which each has `columns` hosts or one more.
struct Groups {
  explicit Groups(int hosts) : hosts(hosts) {
    const int root = static_cast<int>(std::sqrt(hosts));
    columns = root;
    while (columns > root / 2 && hosts % columns != 0) --columns;  // so that all groups are equal
    if (columns <= root / 2) columns = root;
    count = hosts / columns;
  }
  int first(int group) const { return static_cast<int>(int64_t{hosts} * group / count); }

  int hosts, columns, count;
};

}  // namespace

ProposalExchange::ProposalExchange(MPI_Comm hosts, int tag)
    : InterHostExchange(hosts),
      tag_(tag),
      host_(rank_in(hosts)),
      size_(ranks_in(hosts)),
      power_(1 << std::ilogb(size_)),
      beyond_(size_ - power_) {}

void ProposalExchange::start(const Summary& mine, const char* along, int64_t bytes) {
  started_ = true;
  done_ = false;
  step_ = 0;
  along_ = bytes;
  all_.summary = mine;
  std::copy_n(along, bytes, all_.along + place(host_) * bytes);
  step();
}

bool ProposalExchange::advance() {
  if (done_ || !all_complete()) return false;
  step();
  return true;
}

// Where a host's terms are in a part. A host's own are followed by those of the host beyond that it
// stands for, so all that it has gathered lie side by side.
int ProposalExchange::place(int host) const {
  return host < power_ ? host + std::min(host, beyond_) : place(host - power_) + 1;
}

ProposalExchange::Places ProposalExchange::places(int first, int hosts) const {
  const int last = first + hosts - 1;
  return {place(first), place(last) + (last < beyond_ ? 2 : 1)};
}

void ProposalExchange::send_part(const Places& places, int to) {
  sent_.summary = all_.summary;
  std::copy_n(all_.along + places.begin * along_, bytes(places), sent_.along);
  send(&sent_, static_cast<int64_t>(sizeof sent_.summary) + bytes(places), to, tag_);
}

void ProposalExchange::receive_part(const Places& places, int from) {
  coming_ = places;
  receive(&received_, sizeof received_, from, tag_);  // at most
}

void ProposalExchange::add_received() {
  all_.summary.add(received_.summary);
  std::copy_n(received_.along, bytes(coming_), all_.along + coming_.begin * along_);
}

void ProposalExchange::step() {
  const int levels = std::ilogb(size_), step = step_++;
  const bool stands_for_another = host_ < beyond_;
  if (host_ >= power_) {
    if (step == 0) {
      receive_part({0, size_}, host_ - power_);
      send_part({place(host_), place(host_) + 1}, host_ - power_);
    } else {
      all_.summary = Summary();
      add_received();
      done_ = true;
    }
    return;
  }
  if (step == 1 ? stands_for_another : step > 1 && step <= levels + 1) add_received();
  if (step == 0 && stands_for_another)
    receive_part({place(host_) + 1, place(host_) + 2}, host_ + power_);
  if (step > 0 && step <= levels) {
    const int hosts = 1 << (step - 1), first = host_ & -hosts;
    receive_part(places(first ^ hosts, hosts), host_ ^ hosts);
    send_part(places(first, hosts), host_ ^ hosts);
  }
  if (step == levels + 1 && stands_for_another) send_part({0, size_}, host_ + power_);
  done_ = step == levels + (stands_for_another ? 2 : 1);
}

Gathered::Gathered(MPI_Comm hosts, const char* mine, int64_t bytes, int tag, Then then)
    : ProposalExchange(hosts, tag), then_(std::move(then)) {
  start({}, mine, bytes);
}

bool Gathered::advance() {
  const bool progressed = ProposalExchange::advance();
  if (progressed && done()) then_(*this);
  return progressed;
}

// A grid is the direct exchange within groups of hosts, and of their sums between groups: four
// latencies, and some 4 sqrt(H) messages to as many hosts in place of 2(H - 1). Where groups differ
// in size, their leaders move up to (1 + 1/(2 sqrt(H))) times the least bytes.
std::unique_ptr<InterHostExchange> new_inter_host_allreduce(Allreduce algorithm, MPI_Comm hosts,
                                                            const Slice& slice, int tag) {
  const int host = rank_in(hosts), count = ranks_in(hosts);
  if (is_gathered(slice, count)) {
    const auto add = [slice, count](const Gathered& gathered) {
      std::vector<const void*> terms;
      for (int h = 0; h < count; ++h) terms.push_back(gathered.along(h));
      loops().reduce(slice.dtype, slice.reduction, slice.factors, terms.data(), count,
                     slice.elements, slice.data);
    };
    return std::make_unique<Gathered>(hosts, slice.data, slice.elements * size_of(slice.dtype), tag,
                                      add);
  }
  if (algorithm != Allreduce::grid) {
    std::vector<int> peers = range(0, count);
    const bool at_root = slice.root >= 0 && count == 2;  // one latency, and as few bytes come
    if (at_root) std::swap(peers[0], peers[slice.root]);
    return std::make_unique<Direct>(hosts, std::move(peers), slice, tag, at_root ? 1 : 0);
  }
  const Groups groups(count);
  int group = 0;
  while (groups.first(group + 1) <= host) ++group;
  const int first = groups.first(group);
  std::vector<int> beyond;
  for (int g = 0; g < groups.count; ++g) beyond.push_back(groups.first(g) + host - first);
  Slice to_all = slice;
  to_all.root = -1;
  return std::make_unique<Direct>(hosts, range(first, groups.first(group + 1)), to_all, tag,
                                  groups.columns, std::move(beyond));
}

bool is_gathered(const Slice& slice, int hosts) {
  return slice.elements * size_of(slice.dtype) * hosts <= kGatheredBytes;
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
