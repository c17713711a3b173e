// Ranks that are threads, each with an engine, and requests with results to wait for.
#pragma once

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "tests/support/check.h"
#include "tests/support/thread_transport.h"

namespace hvd::test {

constexpr int kRanks = 3;

using LeaveResult = Engine::LeaveResult;

// Runs a body on each rank, with an engine.
inline void on_all_ranks(const Settings& settings, const std::function<void(Engine&, int)>& body,
                         double patience = 0.0005) {
  const auto hub = std::make_shared<Hub>(kRanks, patience);
  in_threads(kRanks, [&](int rank) {
    Engine engine(std::make_unique<ThreadTransport>(hub, rank), settings);
    body(engine, rank);
  });
}

inline LeaveResult leave(Engine& engine, const std::string& reason) {
  engine.announce_leaving("left the job: " + reason);
  return engine.leave(-1);
}

// One request and its result; `values` are this rank's, of one dimension.
class Call {
 public:
  std::thread::id done_on;
  std::function<void()> then;  // called by done()

  Call(Kind kind, std::string name, std::vector<float> values = {})
      : values_(std::move(values)), result_(promise_.get_future()) {
    request_.kind = kind;
    request_.name = std::move(name);
    if (kind == Kind::barrier || kind == Kind::join) return;
    request_.inputs.push_back(
        {values_.data(), DType::float32, {static_cast<int64_t>(values_.size())}});
    if (kind == Kind::allreduce) {
      output = values_;
      request_.outputs.push_back(output.data());
    }
  }

  void submit(Engine& engine) {
    request_.allocate = [this](size_t, const Shape& shape, void** data) {
      output.resize(elements(shape));
      *data = output.data();
      return Status();
    };
    request_.done = [this](const Status& status) {
      done_on = std::this_thread::get_id();
      if (then) then();
      promise_.set_value(status);
    };
    engine.submit(request_);
  }

  Status wait() { return result_.get(); }

  Status run(Engine& engine) {
    submit(engine);
    return wait();
  }

  Request& request() { return request_; }
  std::vector<float> output;

 private:
  std::vector<float> values_;
  Request request_;
  std::promise<Status> promise_;
  std::future<Status> result_;
};

inline std::vector<float> times_ranks(float value) {
  return {value * kRanks, value + value + value};
}

}  // namespace hvd::test
