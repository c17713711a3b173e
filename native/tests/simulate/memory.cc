// What the core asks the system for: memory that ranks share, cores, and a place for its messages.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/cores.h"
#include "core/base/log.h"
#include "core/math/send.h"
#include "tests/simulate/network.h"

namespace hvd {
namespace {

struct Block {
  explicit Block(size_t bytes)
      : bytes(bytes),
        data(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Block() { ::munmap(data, bytes); }
  Block(const Block&) = delete;
  const size_t bytes;
  void* const data;
};
using File = std::shared_ptr<std::unique_ptr<Block>>;

std::map<std::string, File> names;
std::vector<File> open_files;  // until the next job begins

}  // namespace

namespace sim {

void new_memory() {
  names.clear();
  open_files.clear();
}

}  // namespace sim

int shm_open(const char* name, int, mode_t) {
  const auto found = names.emplace(name, std::make_shared<std::unique_ptr<Block>>());
  open_files.push_back(found.first->second);
  return static_cast<int>(open_files.size()) - 1;
}

int shm_unlink(const char* name) {
  names.erase(name);
  return 0;
}

int ftruncate(int file, off_t bytes) {
  *open_files[file] = std::make_unique<Block>(bytes);
  return 0;
}

int posix_fallocate(int, off_t, off_t bytes) {
  return bytes > sim::shared_bytes(sim::simulation->process().host) ? ENOSPC : 0;
}

void* mmap(void*, size_t, int, int, int file, off_t) { return (*open_files[file])->data; }
int munmap(void*, size_t) { return 0; }
int close(int) { return 0; }

Cores affinity() { return Cores{}; }
int count(const Cores&) { return 1; }

void send(const void* from, int64_t bytes, void* to) { std::memcpy(to, from, bytes); }

bool logs(LogLevel level) { return level >= LogLevel::warning; }
void log(LogLevel level, const std::string& text) {
  if (logs(level)) sim::logged(text);
}

}  // namespace hvd
