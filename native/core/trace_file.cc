#include "core/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace hvd {
namespace {

// Some hundred events; doubling keeps the cost of copying below that of writing.
constexpr int64_t kFirstBytes = 64 << 10;
constexpr int64_t kCopyBytes = 1 << 20;

bool write_all(int descriptor, const std::string& bytes, int64_t at) {
  return pwrite(descriptor, bytes.data(), bytes.size(), at) == static_cast<ssize_t>(bytes.size());
}

}  // namespace

Status TraceFile::open(const std::string& path) {
  close();
  path_ = path;
  position_ = closing_ = 0;
  waiting_.clear();
  empty_ = true;
  return resize(kFirstBytes);
}

void TraceFile::close() {
  if (is_open()) ::close(descriptor_);
  descriptor_ = -1;
}

Status TraceFile::add(const std::string& object) {
  const std::string text = (empty_ ? "\n" : ",\n") + object;
  const int64_t size = static_cast<int64_t>(text.size());
  const int64_t end = position_ + static_cast<int64_t>(waiting_.size());
  if (position_ / kPage != (end + size - 1) / kPage) {
    if (Status status = flush(); !status.ok()) return status;
    position_ = (end + kPage - 1) / kPage * kPage;  // what is left of the page stays blank
  }
  if (position_ + static_cast<int64_t>(waiting_.size()) + size > closing_) {
    if (Status status = flush(); !status.ok()) return status;
    if (Status status = resize(2 * (closing_ + 1)); !status.ok()) return status;
  }
  waiting_ += text;
  empty_ = false;
  return {};
}

Status TraceFile::flush() {
  if (waiting_.empty()) return {};
  if (!write_all(descriptor_, waiting_, position_)) return failed("write to");
  position_ += static_cast<int64_t>(waiting_.size());
  waiting_.clear();
  return {};
}

Status TraceFile::finish() {
  Status status = flush();
  if (status.ok()) status = resize(position_ + 1);
  close();
  return status;
}

Status TraceFile::resize(int64_t size) {
  const std::string unfinished = path_ + ".new";
  const int fresh = ::open(unfinished.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fresh < 0) return failed("make");
  bool ok = true;
  std::string piece;
  for (int64_t at = 0; at < size && ok; at += static_cast<int64_t>(piece.size())) {
    piece.assign(std::min(kCopyBytes, size - at), ' ');
    const int64_t known = std::min<int64_t>(static_cast<int64_t>(piece.size()), closing_ - at);
    if (known > 0) ok = pread(descriptor_, piece.data(), known, at) == known;
    if (at == 0) piece.front() = '[';
    if (at + static_cast<int64_t>(piece.size()) == size) piece.back() = ']';
    ok = ok && write_all(fresh, piece, at);
  }
  if (!ok || std::rename(unfinished.c_str(), path_.c_str()) != 0) {
    const Status status = failed("write");
    ::close(fresh);
    unlink(unfinished.c_str());
    return status;
  }
  close();
  descriptor_ = fresh;
  closing_ = size - 1;
  position_ = std::max<int64_t>(position_, 1);
  return {};
}

Status TraceFile::failed(const std::string& what) const {
  return Status::error(Code::invalid_argument, "cannot " + what + " the file '" + path_ +
                                                   "': " + std::strerror(errno) +
                                                   ". Choose a path in a folder that exists, has "
                                                   "space and that rank 0 may write to.");
}

}  // namespace hvd
