// What all transports need to know of a request: how its tensors lie in memory, by how much it is
// scaled, which outputs to allocate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/math/reduce.h"
#include "core/request/request.h"

namespace hvd {

// Of a request that is reduced in one go over so many ranks.
inline Factors factors_of(const Request& request, int ranks) {
  return {request.prescale, request.reduction == Reduction::average ? ranks : 1.0,
          request.postscale};
}

// Memory of one or more tensors, as one, read or written from its start to its end. The tensors may
// be of wider dtypes than what is read and written: they are rounded, or widened, on the way.
class ByteCursor {
 public:
  // What is read and written; bytes, if dtypes do not matter.
  explicit ByteCursor(DType travels = DType::uint8)
      : travels_(travels), width_(static_cast<int64_t>(size_of(travels))) {}

  void add(const void* data, DType dtype, int64_t elements) {
    if (elements == 0) return;
    pieces_.push_back({static_cast<char*>(const_cast<void*>(data)), dtype, elements});
    left_ += elements * width_;
  }

  void add(const void* data, int64_t bytes) { add(data, travels_, bytes / width_); }

  // Of what travels, as all bytes here: whole elements.
  int64_t left() const { return left_; }

  void copy_to(char* target, int64_t bytes) {
    walk(bytes, [&](char* piece, DType dtype, int64_t at, int64_t n) {
      if (dtype == travels_) {
        std::memcpy(target + at, piece, n * width_);
      } else {
        convert(dtype, piece, travels_, target + at, n);
      }
    });
  }

  void copy_from(const char* source, int64_t bytes) {
    walk(bytes, [&](char* piece, DType dtype, int64_t at, int64_t n) {
      if (dtype == travels_) {
        std::memcpy(piece, source + at, n * width_);
      } else {
        convert(travels_, source + at, dtype, piece, n);
      }
    });
  }

  // The next bytes, to be read or written apart from the rest.
  ByteCursor take(int64_t bytes) {
    ByteCursor taken(travels_);
    walk(bytes, [&](char* piece, DType dtype, int64_t, int64_t n) { taken.add(piece, dtype, n); });
    return taken;
  }

  // The next bytes that lie together: there, or in `room` if they do not travel as they are.
  const char* read(char* room) {
    const Piece& piece = pieces_[piece_];
    const int64_t n = piece.elements - offset_;
    if (piece.dtype != travels_) {
      copy_to(room, n * width_);
      return room;
    }
    const char* data = piece.data + offset_ * width_;
    walk(n * width_, [](char*, DType, int64_t, int64_t) {});
    return data;
  }

 private:
  struct Piece {
    char* data;
    DType dtype;
    int64_t elements;
  };

  // Calls with the memory of so many elements, and the byte at which they travel.
  template <typename Copy>
  void walk(int64_t bytes, const Copy& copy) {
    left_ -= bytes;
    for (int64_t done = 0; done < bytes;) {
      const Piece& piece = pieces_[piece_];
      const int64_t n = std::min(piece.elements - offset_, (bytes - done) / width_);
      copy(piece.data + offset_ * static_cast<int64_t>(size_of(piece.dtype)), piece.dtype, done, n);
      done += n * width_;
      offset_ += n;
      if (offset_ == piece.elements) {
        ++piece_;
        offset_ = 0;
      }
    }
  }

  DType travels_;
  int64_t width_;  // of an element that travels
  std::vector<Piece> pieces_;
  int64_t left_ = 0;
  size_t piece_ = 0;
  int64_t offset_ = 0;  // elements of the piece
};

// The inputs and outputs of an allreduce that travel in one dtype.
struct DTypeGroup {
  DType dtype;
  ByteCursor in, out;
};

// In the order in which the dtypes come; none without elements.
std::vector<DTypeGroup> by_dtype(const Request& request);

// Allocates the outputs of an allgather. `rows` are the inputs' first dimensions, rank by rank;
// sets the bytes that each input has on each rank.
Status allocate_gathered(Request& request, const std::vector<int64_t>& rows, int size,
                         std::vector<std::vector<int64_t>>* bytes);

// The first row of a tensor that a rank gets of a reducescatter. The first ranks get one row more
// if the rows do not divide.
int64_t first_row(int64_t rows, int rank, int size);

// Allocates the outputs of a reducescatter.
Status allocate_scattered(Request& request, int rank, int size);

// Memory that goes to a rank of the set, or comes from it. The k-th that a rank sends to another is
// the k-th that the other receives from it.
struct Part {
  int rank;
  char* data;
  int64_t bytes;
};

// Allocates the outputs of an alltoall and sets what goes where. `splits` are those of all ranks:
// by rank, tensor, and the rank to which the rows go.
Status allocate_exchanged(Request& request, const std::vector<int64_t>& splits, int rank, int size,
                          std::vector<Part>* sent, std::vector<Part>* received);

// What a rank sends to itself.
void copy_own(const std::vector<Part>& sent, const std::vector<Part>& received, int rank);

// What a rank makes of its own status and who has failed (not 0), by rank of the set: one rank
// without memory must not leave the others waiting for its bytes.
Status all_or_none(const Status& mine, const std::vector<int64_t>& failed,
                   const std::vector<int>& ranks, const Request& request);

}  // namespace hvd
