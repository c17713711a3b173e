// The last requests of this process, in a file that outlives it however it ends.
//
// The file is mapped into memory, so recording is a few plain stores, and what a killed process has
// stored is there. hvd_keras/postmortem.py reads the file and knows its layout.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "core/base/status.h"
#include "core/request/request.h"

namespace hvd {

class FlightRecorder {
 public:
  enum class State : uint32_t { submitted = 1, running, done, failed };

  FlightRecorder() = default;
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Records at the beginning of this file, which has room. Nothing is recorded without one. Before
  // any request.
  void open(int descriptor, int rank, int size);

  // Thread-safe and without locks. Returns the record's number, from 1; 0 without a file.
  uint64_t submitted(const Request& request, uint64_t fingerprint);
  // A record that 200 later requests have replaced does not change.
  void running(uint64_t record) { change(record, State::running, &Record::started_ns); }
  void ended(uint64_t record, const Status& status);
  // Why requests fail that have no record, or all.
  void failed(const std::string& why);

  // Why this rank submits nothing more.
  void leaving(const std::string& reason);

  // Tells whoever listens at the other end of this socket that requests fail, and waits for an
  // answer (the Python side writes stacks meanwhile), but not for long. A second call within a
  // second does nothing.
  void listen(int socket) { socket_ = socket; }
  void alarm();

 private:
  static constexpr uint64_t kRecords = 200;

  struct Record {
    std::atomic<uint64_t> number;                             // 0: none
    std::atomic<int64_t> submitted_ns, started_ns, ended_ns;  // since 1970; 0: not yet
    uint64_t fingerprint;
    uint64_t bytes;  // of this rank's inputs
    std::atomic<uint32_t> state;
    int32_t process_set;
    char identity[200];
  };
  struct File {
    char magic[8];
    int32_t rank, size;
    std::atomic<uint64_t> last;  // the number of the latest record
    char leaving[1024];
    char failure[4096];  // the latest error
    Record records[kRecords];
  };

  void change(uint64_t record, State state, std::atomic<int64_t> Record::* time);

  File* file_ = nullptr;
  std::mutex mutex_;  // guards the texts of the file
  std::atomic<int> socket_{-1};
  std::chrono::steady_clock::time_point last_alarm_{};
};

}  // namespace hvd
