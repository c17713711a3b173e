// A file in the Trace Event Format: a JSON array to which events are appended, one per line. The
// format lets the closing bracket be absent, so the file of a process that was killed can be read.
#pragma once

#include <atomic>
#include <string>

#include "core/base/status.h"

namespace hvd {

class TraceFile {
 public:
  TraceFile() = default;
  ~TraceFile() { close(); }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Creates the file, or overwrites it, with an empty array.
  Status open(const std::string& path);
  bool is_open() const { return descriptor_ >= 0; }  // on any thread

  // Appends a JSON object, at the next flush().
  void add(const std::string& object);
  Status flush();
  // Writes everything, and closes the array and the file.
  Status finish();
  void close();

 private:
  Status failed(const std::string& what) const;

  std::string path_;
  std::atomic<int> descriptor_{-1};
  std::string waiting_;  // for flush()
  bool empty_ = true;
};

}  // namespace hvd
