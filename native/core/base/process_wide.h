// What this process has once. make simulate runs many ranks in a process, each of which has its
// own.
#pragma once

namespace hvd {

// Never destroyed: engines' threads may outlive main().
template <typename T>
T& of_process() {
  static T* const one = new T;
  return *one;
}

}  // namespace hvd
