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
#include <vector>

#include "core/math/byte_cursor.h"
#include "core/math/layout.h"
#include "core/math/loops.h"
#include "core/request/transport.h"

namespace hvd::test {

// The memory through which the ranks of one set communicate.
class Hub {
 public:
  explicit Hub(int size) : size_(size), slots_(size) {}
  int size() const { return size_; }

  // Every rank's pointer, by rank. They are valid until this rank's next exchange.
  std::vector<const void*> exchange(int rank, const void* mine, const Waiting& waiting) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    const uint64_t round = round_;
    slots_[rank] = mine;
    here_.push_back(rank);
    if (static_cast<int>(here_.size()) == size_) {
      exchanged_ = slots_;
      here_.clear();
      ++round_;
      changed_.notify_all();
      return exchanged_;
    }
    while (round_ == round && why_lost_.empty()) {
      changed_.wait_for(lock, std::chrono::milliseconds(1));
      std::vector<int> missing;
      for (int r = 0; r < size_; ++r) {
        if (std::find(here_.begin(), here_.end(), r) == here_.end()) missing.push_back(r);
      }
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      if (round_ != round || !why_lost_.empty()) break;
      why_lost_ = waiting(waited.count(), missing);
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
  std::string why_lost_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {
    for (int r = 0; r < hub_->size(); ++r) ranks_.push_back(r);
  }

  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  const std::string& host(int) const override { return host_; }

  std::vector<Proposal> agree(const Proposal& mine, const Waiting& waiting) override {
    return of_all(mine, waiting);
  }

  std::vector<std::string> gather(const std::string& mine, const Waiting& waiting) override {
    return of_all(mine, waiting);
  }

  // Sums, concatenations along the first dimension, and what moves no data.
  Status run(Request& request, const Waiting& waiting) override {
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
  template <typename T>
  std::vector<T> of_all(const T& mine, const Waiting& waiting) {
    std::vector<T> all;
    for (const void* other : hub_->exchange(rank_, &mine, waiting))
      all.push_back(*static_cast<const T*>(other));
    hub_->exchange(rank_, nullptr, waiting);  // all have copied
    return all;
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  std::vector<int> ranks_;
  const std::string host_ = "here";
};

}  // namespace hvd::test
