// Copies to memory that ranks on other cores read, and have read before.
//
// A normal store to a cache line that another core has read waits until that core gives it up. If
// the cores share a cache, that is short, and the reader then finds the line in that cache. If not,
// it takes 15 times as long as a non-temporal store, which goes past the caches. Virtual machines
// do not say which it is, and it changes when the host moves their cores. So both are timed, from
// time to time, on the first pages of what is sent.
#pragma once

#include <cstdint>

namespace hvd {

// The bytes arrive before whatever the caller stores next. The two must not overlap.
void send(const void* from, int64_t bytes, void* to);

}  // namespace hvd
