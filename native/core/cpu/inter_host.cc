#include "core/cpu/inter_host.h"

#include <algorithm>
#include <vector>

namespace hvd {
namespace {

// Messages between hosts; the slice is cut into one part per host.
class PointToPoint : public InterHostExchange {
 public:
  PointToPoint(MPI_Comm hosts, const Slice& slice, int tag)
      : slice_(slice),
        width_(static_cast<int64_t>(size_of(slice.dtype))),
        hosts_(hosts),
        tag_(tag) {
    MPI_Comm_rank(hosts, &host_);
    MPI_Comm_size(hosts, &count_);
  }

 protected:
  int64_t begin(int part) const { return slice_.elements * part / count_; }
  int64_t length(int part) const { return begin(part + 1) - begin(part); }
  char* data(int part) const { return slice_.data + begin(part) * width_; }

  // Both sides know how long a part is, so that empty ones need no message.
  void send(int part, int to, int stage) {
    if (length(part) > 0)
      MPI_Isend(data(part), bytes(part), MPI_BYTE, to, tag_ + stage, hosts_, add());
  }
  void receive(int part, void* target, int from, int stage) {
    if (length(part) > 0)
      MPI_Irecv(target, bytes(part), MPI_BYTE, from, tag_ + stage, hosts_, add());
  }
  bool all_complete() {
    int complete = 0;
    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                MPI_STATUSES_IGNORE);
    if (complete) requests_.clear();
    return complete != 0;
  }
  void combine(int part, const std::vector<const void*>& sources, const Factors& factors) {
    loops().reduce(slice_.dtype, slice_.reduction, factors, sources.data(),
                   static_cast<int>(sources.size()), length(part), data(part));
  }

  const Slice slice_;
  const int64_t width_;
  int host_ = 0, count_ = 0;

 private:
  int bytes(int part) const { return static_cast<int>(length(part) * width_); }
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  MPI_Comm hosts_;
  int tag_;
  std::vector<MPI_Request> requests_;
};

// Reduce-scatter, then allgather, each by direct messages between all pairs of hosts: two
// latencies, whatever the number of hosts. Terms are added in the hosts' order.
class Direct : public PointToPoint {
 public:
  Direct(MPI_Comm hosts, const Slice& slice, int tag) : PointToPoint(hosts, slice, tag) {
    received_.resize(length(host_) * width_ * count_);
    with_others([&](int h) { receive(host_, of(h), h, 0); });
    with_others([&](int h) { send(h, h, 0); });
  }

  bool advance() override {
    if (done_ || !all_complete()) return false;
    if (gathering_) return done_ = true;
    gathering_ = true;
    std::vector<const void*> sources;
    for (int h = 0; h < count_; ++h) sources.push_back(h == host_ ? data(host_) : of(h));
    combine(host_, sources, slice_.factors);
    with_others([&](int h) { receive(h, data(h), h, 1); });
    with_others([&](int h) { send(host_, h, 1); });
    return true;
  }

 private:
  char* of(int h) { return received_.data() + h * length(host_) * width_; }

  // Each host starts with a different peer, so that no host receives from all at once.
  template <typename Visit>
  void with_others(const Visit& visit) const {
    for (int i = 1; i < count_; ++i) visit((host_ + i) % count_);
  }

  std::vector<char> received_;
  bool gathering_ = false;
};

// Each host sends only to the next one. Part p starts at host p, and each host adds its own; when
// it has passed all hosts, its sum goes around once more. (Baidu's ring, 2017:
// https://github.com/baidu-research/baidu-allreduce)
class Ring : public PointToPoint {
 public:
  Ring(MPI_Comm hosts, const Slice& slice, int tag) : PointToPoint(hosts, slice, tag) {
    received_.resize(((slice.elements + count_ - 1) / count_) * width_);
    exchange();
  }

  bool advance() override {
    if (done_ || !all_complete()) return false;
    if (step_ < count_ - 1) {
      const bool last = step_ == count_ - 2;
      combine(incoming(), {received_.data(), data(incoming())}, last ? slice_.factors : Factors());
    }
    ++step_;
    done_ = step_ == 2 * (count_ - 1);
    if (!done_) exchange();
    return true;
  }

 private:
  int part(int back) const { return ((host_ - back) % count_ + count_) % count_; }
  int outgoing() const { return part(step_); }
  int incoming() const { return part(step_ + 1); }

  void exchange() {
    void* target = step_ < count_ - 1 ? received_.data() : data(incoming());
    receive(incoming(), target, part(1), 0);
    send(outgoing(), part(-1), 0);
  }

  std::vector<char> received_;
  int step_ = 0;
};

MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::boolean:  // 0 or 1, reduced by min and max alone
    case DType::uint8:
      return MPI_UINT8_T;
    case DType::int8:
      return MPI_INT8_T;
    case DType::uint16:
      return MPI_UINT16_T;
    case DType::int16:
      return MPI_INT16_T;
    case DType::uint32:
      return MPI_UINT32_T;
    case DType::int32:
      return MPI_INT32_T;
    case DType::uint64:
      return MPI_UINT64_T;
    case DType::int64:
      return MPI_INT64_T;
    case DType::float32:
      return MPI_FLOAT;
    case DType::float64:
      return MPI_DOUBLE;
    default:
      return MPI_DATATYPE_NULL;  // MPI has no half precision
  }
}

MPI_Op mpi_op(Reduction reduction) {
  switch (reduction) {
    case Reduction::min:
      return MPI_MIN;
    case Reduction::max:
      return MPI_MAX;
    case Reduction::product:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

// MPI's own algorithm.
class Mpi : public InterHostExchange {
 public:
  Mpi(MPI_Comm hosts, const Slice& slice) : slice_(slice) {
    MPI_Iallreduce(MPI_IN_PLACE, slice.data, static_cast<int>(slice.elements),
                   mpi_type(slice.dtype), mpi_op(slice.reduction), hosts, &request_);
  }

  bool advance() override {
    if (done_) return false;
    int complete = 0;
    MPI_Test(&request_, &complete, MPI_STATUS_IGNORE);
    if (!complete) return false;
    const void* sum = slice_.data;
    loops().reduce(slice_.dtype, slice_.reduction, slice_.factors, &sum, 1, slice_.elements,
                   slice_.data);
    return done_ = true;
  }

 private:
  const Slice slice_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

}  // namespace

std::unique_ptr<InterHostExchange> new_inter_host_allreduce(Allreduce algorithm, MPI_Comm hosts,
                                                            const Slice& slice, int tag) {
  if (algorithm == Allreduce::ring) return std::make_unique<Ring>(hosts, slice, tag);
  if (algorithm == Allreduce::mpi && mpi_type(slice.dtype) != MPI_DATATYPE_NULL)
    return std::make_unique<Mpi>(hosts, slice);
  return std::make_unique<Direct>(hosts, slice, tag);
}

}  // namespace hvd
