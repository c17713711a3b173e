// What each of the simulated processes has once.
#pragma once

#include "tests/simulate/simulation.h"

namespace hvd {

template <typename T>
T& of_process() {
  return sim::simulation->process().wide.of<T>();
}

}  // namespace hvd
