#include "core/gpu/launch_order.h"

#include <algorithm>
#include <map>

namespace hvd {

LaunchOrder& LaunchOrder::of(int device) {
  static std::mutex mutex;
  static auto* const orders = new std::map<int, LaunchOrder>();  // threads use it to the end
  std::lock_guard<std::mutex> lock(mutex);
  return (*orders)[device];
}

LaunchOrder::Turn::Turn(LaunchOrder& order, int process_set, const Exchange& exchange,
                        const Pause& pause)
    : order_(order) {
  {
    std::lock_guard<std::mutex> lock(order_.mutex_);
    place_ = {++order_.clock_, process_set};
    order_.waiting_.insert(place_);
  }
  try {
    const std::vector<int64_t> proposed = exchange(place_.first);
    become(*std::max_element(proposed.begin(), proposed.end()));
    const auto is_first = [&] {
      std::lock_guard<std::mutex> lock(order_.mutex_);
      return *order_.waiting_.begin() == place_;
    };
    while (!is_first()) pause();
  } catch (...) {
    std::lock_guard<std::mutex> lock(order_.mutex_);
    order_.waiting_.erase(place_);
    throw;
  }
}

LaunchOrder::Turn::~Turn() {
  std::lock_guard<std::mutex> lock(order_.mutex_);
  order_.waiting_.erase(place_);
}

void LaunchOrder::Turn::become(int64_t number) {
  std::lock_guard<std::mutex> lock(order_.mutex_);
  order_.waiting_.erase(place_);
  place_.first = number;
  order_.waiting_.insert(place_);
  order_.clock_ = std::max(order_.clock_, number);
}

Event LaunchOrder::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

void LaunchOrder::set_last(const Event& done) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_ = done;
}

void LaunchOrder::forget(const Event& done) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (last_ == done) last_ = nullptr;
}

}  // namespace hvd
