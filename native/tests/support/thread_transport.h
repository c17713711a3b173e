// Ranks as threads of one process, so that sanitizers see all of them: no MPI, the same engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/math/byte_cursor.h"
#include "core/math/layout.h"
#include "core/math/loops.h"
#include "core/request/transport.h"

namespace hvd::test {

// The memory through which the ranks of one set communicate.
class Hub {
 public:
  // `patience`: the seconds that an agreement at once waits.
  explicit Hub(int size, double patience = 0.0005)
      : patience(patience), size_(size), slots_(size), rounds_(size), waits_(size) {}
  int size() const { return size_; }

  const double patience;

  // Every rank's pointer, by rank. They are valid until this rank's next exchange. Empty after
  // `limit` seconds; the next call goes on with it.
  std::vector<const void*> exchange(int rank, const void* mine, const Waiting& waiting,
                                    double limit = 1e9) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    if (!why_lost_.empty()) throw Aborted(why_lost_);
    if (!waits_[rank]) {
      rounds_[rank] = round_;
      slots_[rank] = mine;
      here_.push_back(rank);
    }
    waits_[rank] = false;
    const uint64_t round = rounds_[rank];
    if (static_cast<int>(here_.size()) == size_) {
      exchanged_ = slots_;
      here_.clear();
      ++round_;
      changed_.notify_all();
      return exchanged_;
    }
    while (round_ == round && why_lost_.empty()) {
      changed_.wait_for(lock, std::chrono::milliseconds(1));
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      if (round_ != round || !why_lost_.empty()) break;
      if (waited.count() >= limit) {
        waits_[rank] = true;
        return {};
      }
      why_lost_ = waiting(waited.count(), [this] {
        std::vector<int> missing;
        for (int r = 0; r < size_; ++r)
          if (std::find(here_.begin(), here_.end(), r) == here_.end()) missing.push_back(r);
        return missing;
      });
    }
    if (round_ == round) {
      changed_.notify_all();
      throw Aborted(why_lost_);
    }
    return exchanged_;
  }

  void check_aborted() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!why_lost_.empty()) throw Aborted(why_lost_);
  }

  [[noreturn]] void abort(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (why_lost_.empty()) why_lost_ = why;
    changed_.notify_all();
    throw Aborted(why_lost_);
  }

 private:
  const int size_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<const void*> slots_, exchanged_;
  std::vector<int> here_;
  uint64_t round_ = 0;
  std::vector<uint64_t> rounds_;  // by rank: the last one that it has come to
  std::vector<char> waits_;       // by rank: its next call goes on with that
  std::string why_lost_;
};

class ThreadTransport : public Transport {
  static constexpr size_t kMostAlong = 64, kMostAtOnce = 1024;

 public:
  ThreadTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {
    for (int r = 0; r < hub_->size(); ++r) ranks_.push_back(r);
  }

  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  const std::string& host(int) const override { return host_; }

  std::optional<Summary> agree(const Proposal& mine, const Request* next,
                               const Waiting& waiting) override {
    if (!waiting) return at_once(mine, *next);
    if (!proposed_) sent_ = {mine, next ? copies(*next) : std::vector<std::vector<char>>()};
    proposed_ = false;
    return received(of_all(sent_, waiting));
  }

  std::optional<Summary> at_once(const Proposal& mine, const Request& next) {
    for (const Input& input : next.inputs) {
      if (input.bytes() > kMostAtOnce) return {};
    }
    if (next.kind != Kind::allreduce) return {};
    sent_ = {mine, copies(next)};
    const Waiting nothing = [](double, const Missing&) { return std::string(); };
    try {
      std::vector<Sent> all = of_all(sent_, nothing, hub_->patience);
      proposed_ = all.empty();
      if (proposed_) return {};
      return received(std::move(all));
    } catch (const Aborted&) {
      return {};  // the next call will throw it
    }
  }

  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override {
    return of_all(mine, waiting);
  }

  // Sums, concatenations along the first dimension, and what moves no data.
  Status run(Request& request, const Waiting& waiting) override {
    if (!along_.empty()) {
      for (size_t i = 0; i < request.inputs.size(); ++i) {
        std::vector<const void*> sources;
        for (const Sent& other : along_) sources.push_back(other.inputs[i].data());
        const Input& input = request.inputs[i];
        loops().reduce(input.dtype, request.reduction, factors_of(request, size()), sources.data(),
                       size(), elements(input.shape), request.outputs[i]);
      }
      along_.clear();
      return {};
    }
    if (request.name == "stuck on rank 2" && rank_ == 2)
      std::this_thread::sleep_for(std::chrono::seconds(1));
    std::vector<const Request*> all;
    for (const void* other : hub_->exchange(rank_, &request, waiting))
      all.push_back(static_cast<const Request*>(other));
    Status status;
    std::exception_ptr thrown;
    for (size_t i = 0; i < request.inputs.size(); ++i) {
      const Input& input = request.inputs[i];
      if (request.kind == Kind::allreduce) {
        std::vector<const void*> sources;
        for (const Request* other : all) sources.push_back(other->inputs[i].data);
        std::vector<char> result(input.bytes());
        loops().reduce(input.dtype, request.reduction, factors_of(request, size()), sources.data(),
                       size(), elements(input.shape), result.data());
        hub_->exchange(rank_, nullptr, waiting);  // all have read before any writes, maybe in place
        std::memcpy(request.outputs[i], result.data(), result.size());
      } else {
        Shape shape = input.shape;
        shape[0] = 0;
        for (const Request* other : all) shape[0] += other->inputs[i].shape[0];
        void* data = nullptr;
        try {
          status = request.allocate(i, shape, &data);
        } catch (...) {  // the others still look at this rank's request
          thrown = std::current_exception();
        }
        for (const Request* other : all) {
          const size_t bytes = other->inputs[i].bytes();
          if (bytes > 0 && !thrown) std::memcpy(data, other->inputs[i].data, bytes);
          data = static_cast<char*>(data) + bytes;
        }
      }
    }
    hub_->exchange(rank_, nullptr, waiting);  // nobody's inputs go away while others read them
    if (thrown) std::rethrow_exception(thrown);
    if (request.kind == Kind::join) {
      void* last = nullptr;
      status = request.allocate(0, {}, &last);
      *static_cast<int32_t*>(last) = request.root;
    }
    return status;
  }

  void abort(const std::string& why) override { hub_->abort(why); }
  void check_aborted() override { hub_->check_aborted(); }

 private:
  // A proposal, and the tensors of a small allreduce.
  struct Sent {
    Proposal proposal;
    std::vector<std::vector<char>> inputs;
  };

  static std::vector<std::vector<char>> copies(const Request& next) {
    std::vector<std::vector<char>> all;
    for (const Input& input : next.inputs) {
      if (next.kind != Kind::allreduce || input.bytes() > kMostAlong) return {};
      const char* const data = static_cast<const char*>(input.data);
      all.emplace_back(data, data + input.bytes());
    }
    return all;
  }

  Summary received(std::vector<Sent> all) {
    Summary agreement;
    for (size_t r = 0; r < all.size(); ++r)
      agreement.add(Summary(all[r].proposal, static_cast<int>(r)));
    const auto differs = [&](const Sent& sent) {
      return sent.proposal.fingerprint != all[0].proposal.fingerprint || sent.inputs.empty();
    };
    along_.clear();
    if (std::none_of(all.begin(), all.end(), differs)) along_ = std::move(all);
    return agreement;
  }

  template <typename T>
  std::vector<T> of_all(const T& mine, const Waiting& waiting, double limit = 1e9) {
    std::vector<T> all;
    for (const void* other : hub_->exchange(rank_, &mine, waiting, limit))
      all.push_back(*static_cast<const T*>(other));
    if (all.empty()) return all;
    hub_->exchange(rank_, nullptr, waiting);  // all have copied
    return all;
  }

  const std::shared_ptr<Hub> hub_;
  Sent sent_;                // the others may read it after at_once(),
  bool proposed_ = false;    // which did not see all of theirs
  std::vector<Sent> along_;  // for run()
  const int rank_;
  std::vector<int> ranks_;
  const std::string host_ = "here";
};

}  // namespace hvd::test
