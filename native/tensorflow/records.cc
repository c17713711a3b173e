// Reads records of TFRecord files by their places. A record is the length of its data (8 bytes,
// little-endian), a checksum of that (4), the data, and a checksum of the data (4).
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/hash/crc32c.h"

namespace hvd {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;

constexpr int64_t kHeader = 12, kFooter = 4;
constexpr int64_t kChunk = 1 << 16;  // of a file with short records, read at once for the index
constexpr int kRecords = 256;        // at most, of one read: three parts each, below IOV_MAX
constexpr size_t kFiles = 64;        // kept open
constexpr size_t kLargest = (32 << 20) - 8192;  // that glibc learns from (mallopt(3))

REGISTER_OP("HvdRecordOffsets")
    .Input("path: string")
    .Output("offsets: int64")  // where each record begins, and where the last one ends
    .SetIsStateful()           // the file may change
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    });

REGISTER_OP("HvdReadRecords")
    .Input("paths: string")
    .Input("files: int64")    // [records]: which path
    .Input("offsets: int64")  // [records]
    .Input("lengths: int64")  // [records]: with both checksums
    .Output("records: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)), error_(errno) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  absl::Status opened() const { return descriptor_ < 0 ? failed(error_) : absl::OkStatus(); }
  absl::Status failed(int error) const {
    return absl::UnavailableError(path_ + ": " + std::generic_category().message(error));
  }
  absl::Status damaged(int64_t offset, const char* what) const {
    return absl::DataLossError(path_ + ": " + what + " at byte " + std::to_string(offset));
  }

  absl::Status size(int64_t* bytes) const {
    struct stat facts;
    if (fstat(descriptor_, &facts) != 0) return failed(errno);
    *bytes = facts.st_size;
    return absl::OkStatus();
  }

  // Fills all parts, which it changes.
  absl::Status read(std::vector<iovec>* parts, int64_t offset) const {
    iovec* part = parts->data();
    iovec* const end = part + parts->size();
    while (part != end) {
      const ssize_t got = preadv(descriptor_, part, static_cast<int>(end - part), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return failed(errno);
      if (got == 0) return damaged(offset, "the file ends");
      offset += got;
      size_t rest = got;
      while (part != end && rest >= part->iov_len) rest -= (part++)->iov_len;
      if (part == end) break;
      part->iov_base = static_cast<char*>(part->iov_base) + rest;
      part->iov_len -= rest;
    }
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  const int descriptor_;
  const int error_;
};

bool is_intact(const char* data, int64_t size, const char* checksum) {
  uint32_t stored;
  std::memcpy(&stored, checksum, sizeof stored);
  return tensorflow::crc32c::Unmask(stored) == tensorflow::crc32c::Value(data, size);
}

// The length of a record's data; -1 if this is no header.
int64_t length_of(const char* header) {
  int64_t length;
  std::memcpy(&length, header, sizeof length);
  return is_intact(header, sizeof length, header + sizeof length) ? length : -1;
}

absl::Status find_records(const std::string& path, std::vector<int64_t>* offsets) {
  const File file(path);
  TF_RETURN_IF_ERROR(file.opened());
  int64_t size = 0, place = 0, begin = 0, have = 0, last = 0;
  TF_RETURN_IF_ERROR(file.size(&size));
  std::vector<char> buffer(kChunk);
  while (place < size) {
    if (place + kHeader > size) return file.damaged(place, "the file ends within a record");
    if (place < begin || place + kHeader > begin + have) {
      // Long records are stepped over; of short ones many are in a chunk.
      begin = place;
      have = std::min(size - place, last < kChunk / 2 ? kChunk : kHeader);
      std::vector<iovec> parts{{buffer.data(), static_cast<size_t>(have)}};
      TF_RETURN_IF_ERROR(file.read(&parts, begin));
    }
    const int64_t length = length_of(buffer.data() + (place - begin));
    if (length < 0) return file.damaged(place, "no record of an uncompressed TFRecord file");
    last = kHeader + length + kFooter;
    if (length > size - place - kHeader - kFooter)
      return file.damaged(place, "the file ends within the record");
    offsets->push_back(place);
    place += last;
  }
  offsets->push_back(place);
  return absl::OkStatus();
}

class RecordOffsetsKernel : public OpKernel {
 public:
  explicit RecordOffsetsKernel(OpKernelConstruction* c) : OpKernel(c) {}

  void Compute(OpKernelContext* c) override {
    std::vector<int64_t> offsets;
    OP_REQUIRES_OK(c, find_records(c->input(0).scalar<tstring>()(), &offsets));
    Tensor* output = nullptr;
    const int64_t count = offsets.size();
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({count}), &output));
    std::copy(offsets.begin(), offsets.end(), output->flat<int64_t>().data());
  }
};

class ReadRecordsKernel : public OpKernel {
 public:
  // Until a large block has been freed, malloc gives the memory of records back to the system, and
  // gets it again, page by page, for the next ones. That took as long as reading them.
  explicit ReadRecordsKernel(OpKernelConstruction* c) : OpKernel(c) {
    void* volatile block = std::malloc(kLargest);
    std::free(block);
  }

  void Compute(OpKernelContext* c) override {
    const auto paths = c->input(0).flat<tstring>();
    const auto files = c->input(1).flat<int64_t>(), offsets = c->input(2).flat<int64_t>(),
               lengths = c->input(3).flat<int64_t>();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, c->input(1).shape(), &output));
    auto records = output->flat<tstring>();
    const int64_t count = files.size();
    for (int64_t first = 0, end; first < count; first = end) {
      // Records that follow each other in a file are one read.
      for (end = first + 1; end < std::min(first + kRecords, count); ++end) {
        if (files(end) != files(first) || offsets(end) != offsets(end - 1) + lengths(end - 1))
          break;
      }
      std::shared_ptr<const File> file;
      OP_REQUIRES_OK(c, open(paths(files(first)), &file));
      std::vector<iovec> parts;
      std::vector<std::array<char, kHeader + kFooter>> frames(end - first);
      for (int64_t i = first; i < end; ++i) {
        char* const frame = frames[i - first].data();
        OP_REQUIRES(c, lengths(i) >= kHeader + kFooter,
                    file->damaged(offsets(i), "a wrong length in the index"));
        records(i).resize_uninitialized(lengths(i) - kHeader - kFooter);
        parts.push_back({frame, kHeader});
        parts.push_back({records(i).data(), records(i).size()});
        parts.push_back({frame + kHeader, kFooter});
      }
      OP_REQUIRES_OK(c, file->read(&parts, offsets(first)));
      for (int64_t i = first; i < end; ++i) {
        const char* const frame = frames[i - first].data();
        const tstring& data = records(i);
        const int64_t length = data.size();
        OP_REQUIRES(c,
                    length_of(frame) == length && is_intact(data.data(), length, frame + kHeader),
                    file->damaged(offsets(i), "a damaged record, or the file has changed,"));
      }
    }
  }

 private:
  absl::Status open(const std::string& path, std::shared_ptr<const File>* file) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(path);
    if (found != files_.end()) {
      *file = found->second;
      return absl::OkStatus();
    }
    *file = std::make_shared<const File>(path);
    TF_RETURN_IF_ERROR((*file)->opened());
    if (files_.size() >= kFiles) files_.clear();  // who reads now keeps its own
    files_[path] = *file;
    return absl::OkStatus();
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const File>> files_;
};

REGISTER_KERNEL_BUILDER(Name("HvdRecordOffsets").Device(tensorflow::DEVICE_CPU),
                        RecordOffsetsKernel);
REGISTER_KERNEL_BUILDER(Name("HvdReadRecords").Device(tensorflow::DEVICE_CPU), ReadRecordsKernel);

}  // namespace
}  // namespace hvd
