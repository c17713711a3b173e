#include "core/engine/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hvd {

Status TraceFile::open(const std::string& path) {
  close();
  path_ = path;
  waiting_ = "[";
  empty_ = true;
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  if (!is_open()) return failed("make");
  return flush();
}

void TraceFile::close() {
  if (is_open()) ::close(descriptor_);
  descriptor_ = -1;
}

void TraceFile::add(const std::string& object) {
  waiting_ += (empty_ ? "\n" : ",\n") + object;
  empty_ = false;
}

Status TraceFile::flush() {
  for (size_t done = 0; done < waiting_.size();) {
    const ssize_t written = write(descriptor_, waiting_.data() + done, waiting_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("write to");
    done += static_cast<size_t>(written);
  }
  waiting_.clear();
  return {};
}

Status TraceFile::finish() {
  waiting_ += "\n]\n";
  Status status = flush();
  close();
  return status;
}

Status TraceFile::failed(const std::string& what) const {
  return Status::error(Code::invalid_argument, "cannot " + what + " the file '" + path_ +
                                                   "': " + std::strerror(errno) +
                                                   ". Choose a path in a folder that exists, has "
                                                   "space and that rank 0 may write to.");
}

}  // namespace hvd
