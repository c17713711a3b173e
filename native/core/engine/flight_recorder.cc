#include "core/engine/flight_recorder.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/request/collectives.h"

namespace hvd {
namespace {

// For how long the Python side may write stacks; it needs the interpreter's lock.
constexpr int kStacksMilliseconds = 15000;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <size_t N>
void store(char (&to)[N], const std::string& text) {
  const size_t size = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), size);
  std::memset(to + size, 0, N - size);
}

}  // namespace

FlightRecorder::~FlightRecorder() {
  if (file_) munmap(file_, sizeof(File));
}

void FlightRecorder::open(int descriptor, int rank, int size) {
  void* const memory =
      mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return;
  file_ = static_cast<File*>(memory);
  std::memcpy(file_->magic, "hvdreq1", sizeof file_->magic);
  file_->rank = rank;
  file_->size = size;
}

uint64_t FlightRecorder::submitted(const Request& request, uint64_t fingerprint) {
  if (!file_) return 0;
  const uint64_t number = file_->last.fetch_add(1, std::memory_order_relaxed) + 1;
  Record& record = file_->records[number % kRecords];
  record.number = 0;
  record.submitted_ns = now_ns();
  record.started_ns = 0;
  record.ended_ns = 0;
  record.fingerprint = fingerprint;
  record.bytes = input_bytes(request);
  record.process_set = request.process_set;
  record.state = static_cast<uint32_t>(State::submitted);
  store(record.identity, identity(request));
  record.number.store(number, std::memory_order_release);
  return number;
}

void FlightRecorder::change(uint64_t number, State state, std::atomic<int64_t> Record::* time) {
  if (number == 0) return;
  Record& record = file_->records[number % kRecords];
  if (record.number.load(std::memory_order_acquire) != number) return;
  record.*time = now_ns();
  record.state = static_cast<uint32_t>(state);
}

void FlightRecorder::ended(uint64_t number, const Status& status) {
  change(number, status.ok() ? State::done : State::failed, &Record::ended_ns);
  if (!status.ok()) failed(status.message);
}

void FlightRecorder::failed(const std::string& why) {
  if (!file_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  store(file_->failure, why);
}

void FlightRecorder::leaving(const std::string& reason) {
  if (!file_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  store(file_->leaving, reason);
}

void FlightRecorder::alarm() {
  const auto now = std::chrono::steady_clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (socket_ < 0 || now - last_alarm_ < std::chrono::seconds(1)) return;
    last_alarm_ = now;
  }
  char byte = 0;
  if (send(socket_, &byte, 1, MSG_NOSIGNAL) != 1) return;
  pollfd answer{socket_, POLLIN, 0};
  if (poll(&answer, 1, kStacksMilliseconds) == 1) (void)!recv(socket_, &byte, 1, 0);
}

}  // namespace hvd
