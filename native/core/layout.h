// How the tensors of a request lie in memory, for all transports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/request.h"

namespace hvd {

// Memory of one or more tensors, as one, read or written from its start to its end.
class Stream {
 public:
  void add(const void* data, int64_t bytes) {
    if (bytes > 0) pieces_.push_back({static_cast<char*>(const_cast<void*>(data)), bytes});
    left_ += bytes;
  }

  int64_t left() const { return left_; }

  void copy_to(char* target, int64_t bytes) {
    walk(bytes, [&](char* piece, int64_t at, int64_t n) { std::memcpy(target + at, piece, n); });
  }

  void copy_from(const char* source, int64_t bytes) {
    walk(bytes, [&](char* piece, int64_t at, int64_t n) { std::memcpy(piece, source + at, n); });
  }

 private:
  struct Piece {
    char* data;
    int64_t bytes;
  };

  template <typename Copy>
  void walk(int64_t bytes, const Copy& copy) {
    left_ -= bytes;
    for (int64_t done = 0; done < bytes;) {
      const Piece& piece = pieces_[piece_];
      const int64_t n = std::min(piece.bytes - offset_, bytes - done);
      copy(piece.data + offset_, done, n);
      done += n;
      offset_ += n;
      if (offset_ == piece.bytes) {
        ++piece_;
        offset_ = 0;
      }
    }
  }

  std::vector<Piece> pieces_;
  int64_t left_ = 0;
  size_t piece_ = 0;
  int64_t offset_ = 0;  // in the piece
};

// The inputs and outputs of an allreduce that have one dtype.
struct OfOneDType {
  DType dtype;
  Stream in, out;
};

// In the order in which the dtypes come; none without bytes.
std::vector<OfOneDType> by_dtype(const Request& request);

// Allocates the outputs of an allgather. `rows` are the inputs' first dimensions, rank by rank;
// sets the bytes that each input has on each rank.
Status allocate_gathered(Request& request, const std::vector<int64_t>& rows, int size,
                         std::vector<std::vector<int64_t>>* bytes);

// What a rank makes of its own status and who has failed (not 0), by rank of the set: one rank
// without memory must not leave the others waiting for its bytes.
Status all_or_none(const Status& mine, const std::vector<int64_t>& failed,
                   const std::vector<int>& ranks, const Request& request);

}  // namespace hvd
