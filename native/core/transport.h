// What the engine needs of a way to reach the other ranks of its process set.
// All calls are collective, and come from the engine's thread alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/request.h"
#include "core/status.h"

namespace hvd {

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Whether all ranks passed the same value. Waits for the slowest rank without burning a core;
  // `waiting` is called now and then meanwhile, with the seconds waited so far.
  virtual bool agree(uint64_t value, const std::function<void(double)>& waiting) = 0;

  // Every rank's bytes, by rank.
  virtual std::vector<std::string> gather(const std::string& mine) = 0;

  // Moves the data of a request that all ranks have agreed on.
  virtual Status run(Request& request) = 0;
};

}  // namespace hvd
