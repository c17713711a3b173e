// A JSON array in a file that is a whole document at every moment, even if this process is killed.
//
//   [ object , object , object        spaces        ]
//
// Objects are written over the spaces. No write crosses a page's border, since Linux may break off
// a longer one there when the process is killed. When the spaces run out, a copy of twice the
// length takes the file's place in one step.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.h"

namespace hvd {

class TraceFile {
 public:
  // An object must be shorter than this, in bytes, by a separator of two.
  static constexpr int64_t kPage = 4096;

  TraceFile() = default;
  ~TraceFile() { close(); }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Replaces what is there by an empty array.
  Status open(const std::string& path);
  bool is_open() const { return descriptor_ >= 0; }

  // Puts an object's text into the array, at the next flush() at the latest.
  Status add(const std::string& object);
  Status flush();
  // Writes all, and leaves out the spaces.
  Status finish();
  void close();

 private:
  Status resize(int64_t size);
  Status failed(const std::string& what) const;

  std::string path_;
  int descriptor_ = -1;
  int64_t position_ = 0;  // where the next write begins
  int64_t closing_ = 0;   // where the closing bracket is
  std::string waiting_;   // for flush(), within one page
  bool empty_ = true;
};

}  // namespace hvd
