// Memory of devices and page-locked memory, and who may use it when.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

// A use of a piece of memory.
struct Use {
  int stream;
  uint64_t place;
  std::string what;
  const char *begin, *end;
  bool writes;
};

struct Region {
  size_t bytes;
  size_t mapped;
  char* work;  // the same memory, as streams see it
  bool on_device;
  int protection;         // of the host's pages
  std::vector<Use> uses;  // the last ones
};

bool aware_mpi = false;

std::map<const char*, Region>& regions() {
  static auto* regions = new std::map<const char*, Region>();
  return *regions;
}

// What any thread of the host has seen.
Clock& any_host() {
  static auto* clock = new Clock();
  return *clock;
}

std::pair<const char*, Region*> region_of(const void* data) {
  const char* address = static_cast<const char*>(data);
  auto after = regions().upper_bound(address);
  if (after == regions().begin()) return {nullptr, nullptr};
  auto& [start, region] = *--after;
  if (address >= start + region.bytes) return {nullptr, nullptr};
  return {start, &region};
}

const Use* user(const Region& region, bool also_readers) {
  for (const Use& use : region.uses)
    if ((use.writes || also_readers) && any_host()[use.stream] < use.place) return &use;
  return nullptr;
}

void protect(const char* start, Region& region) {
  int wanted = PROT_READ | PROT_WRITE;
  if (user(region, true)) wanted = PROT_READ;
  if (user(region, false) || (region.on_device && !aware_mpi)) wanted = PROT_NONE;
  if (wanted == region.protection) return;
  region.protection = wanted;
  mprotect(const_cast<char*>(start), region.mapped, wanted);
}

// Of a memory access by the host.
void on_fault(int, siginfo_t* info, void*) {
  const auto [start, region] = region_of(info->si_addr);
  if (!region) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const Use* use = user(*region, true);
  violation("the host uses memory " +
            (use ? "that '" + use->what + "' in stream " + std::to_string(use->stream) +
                       " may still use, and has not waited for it"
                 : std::string("of a device")));
}

}  // namespace

int allocate(void** out, size_t bytes, bool on_device) {
  *out = nullptr;
  if (bytes == 0) return 0;
  std::lock_guard<std::recursive_mutex> lock(mutex());
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);  // again: MPI sets its own
  const size_t page = sysconf(_SC_PAGESIZE), mapped = (bytes + page - 1) / page * page;
  const int file = memfd_create("hvd-fake-cuda", 0);
  if (file < 0 || ftruncate(file, mapped) != 0) violation("no memory");
  void* both[2];
  for (void*& view : both) {
    view = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (view == MAP_FAILED) violation("no memory");
  }
  close(file);
  *out = both[0];
  char* const work = static_cast<char*>(both[1]);
  std::memset(work, 0x55, bytes);  // so that tests do not find what was there before
  Region& region = regions()[static_cast<char*>(both[0])];
  region = {bytes, mapped, work, on_device, PROT_READ | PROT_WRITE, {}};
  protect(static_cast<char*>(both[0]), region);
  ++living()[on_device ? "device memory" : "pinned memory"];
  return 0;
}

int release(void* data, bool on_device) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  if (!data) return 0;
  const auto found = regions().find(static_cast<const char*>(data));
  if (found == regions().end() || found->second.on_device != on_device)
    violation("memory is freed that was not allocated so");
  Region& region = found->second;
  for (const Use& use : region.uses)
    if (host()[use.stream] < use.place)
      violation("memory is freed that '" + use.what + "' may still use");
  munmap(region.work, region.mapped);
  munmap(data, region.mapped);
  regions().erase(found);
  --living()[on_device ? "device memory" : "pinned memory"];
  return 0;
}

bool is_device_memory(const void* data, size_t bytes) {
  const auto [start, region] = region_of(data);
  return region && region->on_device &&
         static_cast<const char*>(data) + bytes <= start + region->bytes;
}

bool is_pageable(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  return !region_of(data).second;
}

char* in_work(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  const auto [start, region] = region_of(data);
  char* const address = static_cast<char*>(const_cast<void*>(data));
  return region ? region->work + (address - start) : address;
}

void use(CUstream_st& stream, const std::string& what, const Range& range) {
  if (range.bytes == 0) return;
  const auto [start, region] = region_of(range.data);
  if (!region) return;  // the host's own memory
  if (static_cast<const char*>(range.data) + range.bytes > start + region->bytes)
    violation("'" + what + "' goes beyond the end of its memory");
  const auto* const begin = static_cast<const char*>(range.data);
  const Use now{stream.number, stream.given, what, begin, begin + range.bytes, range.writes};
  for (const Use& other : region->uses) {
    const bool conflict =
        now.begin < other.end && other.begin < now.end && (now.writes || other.writes);
    if (!conflict || stream.clock[other.stream] >= other.place) continue;
    violation("'" + what + "' in stream " + std::to_string(stream.number) + " uses memory that '" +
              other.what + "' in stream " + std::to_string(other.stream) + " " +
              (other.writes ? "writes" : "reads") + ", with no event between the two");
  }
  // Who comes after this use comes after those that it covers.
  const auto is_covered = [&](const Use& other) {
    return now.begin <= other.begin && other.end <= now.end &&
           (now.writes || (!other.writes && other.stream == now.stream));
  };
  auto& uses = region->uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_covered), uses.end());
  region->uses.push_back(now);
  protect(start, *region);
}

void host_sees(const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex());
  join(host(), clock);
  if (join(any_host(), clock)) protect_all();
}

void protect_all() {
  for (auto& [start, region] : regions()) protect(start, region);
}

}  // namespace fake_cuda

// For tests: MPI can read and write the memory of devices, if no stream uses it.
EXPORT void hvd_fake_cuda_aware_mpi(int yes) {
  std::lock_guard<std::recursive_mutex> lock(fake_cuda::mutex());
  fake_cuda::aware_mpi = yes != 0;
  fake_cuda::protect_all();
}
