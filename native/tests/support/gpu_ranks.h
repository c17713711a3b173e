// Two ranks as threads of one process, each with a device of the fake of CUDA and NCCL, and
// collectives on tensors of them. No MPI, so that a test can fork for each case.
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "core/gpu/gpu_transport.h"
#include "core/math/layout.h"
#include "tests/support/device.h"
#include "tests/support/thread_transport.h"

namespace hvd::test {

constexpr int kGpuRanks = 2;

inline float gpu_value(int rank, int64_t index) {
  return static_cast<float>(10 * rank + 3 * index + 1);
}

// A collective on one float32 tensor of this many rows of two; rank 1 may have more of them.
class GpuCall {
 public:
  GpuCall(Device& device, Kind kind, std::string name, int rank, int64_t rows, double factor = 1)
      : device_(device), rank_(rank), rows_(rows), factor_(factor), result_(promise_.get_future()) {
    request.kind = kind;
    request.name = std::move(name);
    if (has_no_tensor()) return;
    const int64_t n = 2 * rows_of(rank);
    const size_t bytes = n * sizeof(float);
    in_ = device_.allocate(bytes);
    out_ = device_.allocate(kRoom);
    staged_in_ = device_.pinned(bytes);
    staged_out_ = device_.pinned(kRoom);
    float* const values = static_cast<float*>(staged_in_.get());
    for (int64_t i = 0; i < n; ++i) values[i] = gpu_value(rank, i);
    request.inputs.push_back({in_.get(), DType::float32, {rows_of(rank), 2}});
    if (kind == Kind::alltoall) {
      splits_.assign(kGpuRanks, rows_ / kGpuRanks);
      request.inputs.push_back({splits_.data(), DType::int64, {kGpuRanks}});
    }
    if (kind == Kind::allreduce || kind == Kind::broadcast) request.outputs = {out_.get()};
    request.prescale = factor;
  }

  // In the framework's stream; this part of it is the test's.
  void begin() {
    if (has_no_tensor()) return;
    device_.copy(in_.get(), staged_in_.get(), request.inputs[0].bytes());
    device_.fill(out_.get(), 0x55, kRoom);
    request.device = device_.number();
    request.stream = device_.stream();
  }

  void submit(Engine& engine) {
    request.allocate = [this](size_t index, const Shape&, void** data) {
      *data = out_.get();
      if (request.kind == Kind::join || is_splits(request.kind, index)) *data = &unread_;
      return Status();
    };
    request.done = [this](const Status& status) {
      ++times_done;
      promise_.set_value(status);
    };
    engine.submit(request);
  }

  // False after some seconds of nothing, which are few once the process would be ended.
  bool wait(Status* status, const std::atomic<bool>* stuck = nullptr) {
    int seconds = 0;
    while (result_.wait_for(std::chrono::seconds(1)) != std::future_status::ready) {
      if (++seconds == 60 || (stuck && *stuck)) return false;
    }
    *status = result_.get();
    return true;
  }

  // After synchronize().
  void fetch() {
    if (!has_no_tensor()) device_.copy(staged_out_.get(), out_.get(), kRoom);
  }

  // After that, and synchronize() again.
  void expect_values(bool alone = false) const {
    const float* got = static_cast<const float*>(staged_out_.get());
    const std::vector<float> wanted = expected(alone);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (got[i] == wanted[i]) continue;
      report(false, __FILE__, __LINE__,
             "rank " + std::to_string(rank_) + ": " + request.name + "[" + std::to_string(i) +
                 "] is " + shown(got[i]) + ", expected " + shown(wanted[i]));
      return;
    }
  }

  Request request;
  std::atomic<int> times_done{0};

 private:
  static constexpr size_t kRoom = 4096;

  bool has_no_tensor() const { return request.kind == Kind::join || request.kind == Kind::barrier; }

  // Those of rank 1 are one more, if the kind allows that and they are odd.
  int64_t rows_of(int rank) const {
    return rows_ + (request.kind == Kind::allgather && rows_ % 2 == 1 ? rank : 0);
  }

  // `alone`: the other rank has joined.
  std::vector<float> expected(bool alone) const {
    std::vector<float> all;
    const auto sum = [&](int64_t i) {
      return static_cast<float>(factor_) *
             (alone ? gpu_value(rank_, i) : gpu_value(0, i) + gpu_value(1, i));
    };
    const auto add = [&](int64_t first, int64_t last, const auto& value) {
      for (int64_t i = 2 * first; i < 2 * last; ++i) all.push_back(value(i));
    };
    const auto of = [](int rank) { return [rank](int64_t i) { return gpu_value(rank, i); }; };
    const int64_t half = rows_ / kGpuRanks;
    if (request.kind == Kind::allreduce) add(0, rows_, sum);
    if (request.kind == Kind::broadcast) add(0, rows_, of(0));
    if (request.kind == Kind::reducescatter)
      add(first_row(rows_, rank_, kGpuRanks), first_row(rows_, rank_ + 1, kGpuRanks), sum);
    for (int r = 0; r < kGpuRanks; ++r) {
      if (request.kind == Kind::allgather) add(0, rows_of(r), of(r));
      if (request.kind == Kind::alltoall) add(rank_ * half, (rank_ + 1) * half, of(r));
    }
    return all;
  }

  Device& device_;
  const int rank_;
  const int64_t rows_;
  const double factor_;
  Memory in_, out_, staged_in_, staged_out_;
  std::vector<int64_t> splits_;
  int64_t unread_[kGpuRanks] = {};
  std::promise<Status> promise_;
  std::future<Status> result_;
};

// A rank with one engine for each of some process sets, which all have both ranks.
struct GpuRank {
  GpuRank(int number, const std::vector<std::shared_ptr<Hub>>& hubs, Settings settings)
      : rank(number), device(number) {
    settings.cudart_library = device.settings().cudart_library;
    settings.nccl_library = device.settings().nccl_library;
    for (size_t set = 0; set < hubs.size(); ++set) {
      sets.push_back(
          std::make_unique<Engine>(std::make_unique<GpuTransport>(
                                       std::make_unique<ThreadTransport>(hubs[set], rank), settings,
                                       [this](const std::string& why) {
                                         why_stuck = why;
                                         stuck = true;
                                       },
                                       static_cast<int>(set)),
                                   settings));
    }
    device.keep();  // the other rank's things live
  }

  const int rank;
  Device device;
  std::vector<std::unique_ptr<Engine>> sets;
  std::atomic<bool> stuck{false};  // the process would be ended
  std::string why_stuck;
};

// Runs a body on each rank. `patience`: how long a thread that submits waits for the other rank.
inline void on_gpu_ranks(int process_sets, const Settings& settings,
                         const std::function<void(GpuRank&)>& body, double patience = 0.0005) {
  std::vector<std::shared_ptr<Hub>> hubs;
  for (int i = 0; i < process_sets; ++i) hubs.push_back(std::make_shared<Hub>(kGpuRanks, patience));
  in_threads(kGpuRanks, [&](int r) {
    GpuRank rank(r, hubs, settings);
    body(rank);
  });
}

}  // namespace hvd::test
