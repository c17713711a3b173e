// The tensors of a request as streams of bytes, one per dtype, and the factors of a reduction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/math/loops.h"
#include "core/math/send.h"
#include "core/request/collectives.h"
#include "core/request/request.h"

namespace hvd {

// Of a request that is reduced in one go over so many ranks.
inline Factors factors_of(const Request& request, int ranks) {
  return {request.prescale, request.reduction == Reduction::average ? ranks : 1.0,
          request.postscale};
}

// The memory of one or more tensors as one stream, read or written from its start to its end. The
// tensors may have a wider dtype than the stream: they are rounded when read and widened when
// written.
class ByteCursor {
 public:
  // The dtype of the stream; bytes, if dtypes do not matter.
  explicit ByteCursor(DType travels = DType::uint8) : travels_(travels), width_(size_of(travels)) {}

  void add(const void* data, DType dtype, int64_t elements) {
    if (elements == 0) return;
    pieces_.push_back({static_cast<char*>(const_cast<void*>(data)), dtype, elements});
    left_ = all_ += elements * width_;
  }

  void add(const void* data, int64_t bytes) { add(data, travels_, bytes / width_); }

  // Bytes of the stream, as in all of these methods: whole elements.
  int64_t left() const { return left_; }

  void copy_to(char* target, int64_t bytes) {
    walk(bytes, [&](char* piece, DType dtype, int64_t at, int64_t n) {
      if (dtype == travels_) {
        std::memcpy(target + at, piece, n * width_);
      } else {
        loops().convert(dtype, piece, travels_, target + at, n);
      }
    });
  }

  // To memory that other ranks read, small pieces together.
  void send_to(char* target, int64_t bytes) {
    constexpr int64_t kRoom = 8 << 10;
    alignas(64) char room[kRoom];
    int64_t held = 0;
    const auto send = [&](const char* data, int64_t n) {
      if (n > 0) hvd::send(data, n, target);
      target += n;
    };
    walk(bytes, [&](char* piece, DType dtype, int64_t, int64_t n) {
      const bool as_is = dtype == travels_;
      if (as_is && n * width_ >= kSmallPiece) {
        send(room, std::exchange(held, 0));
        send(piece, n * width_);
        return;
      }
      while (n > 0) {
        const int64_t some = std::min(n, (kRoom - held) / width_);
        if (as_is) {
          std::memcpy(room + held, piece, some * width_);
        } else {
          loops().convert(dtype, piece, travels_, room + held, some);
        }
        piece += some * size_of(dtype);
        held += some * width_;
        n -= some;
        if (kRoom - held < width_) send(room, std::exchange(held, 0));
      }
    });
    send(room, held);
  }

  // What is written from now on does not go through the caches.
  void write_past_caches() { past_caches_ = true; }

  void copy_from(const char* source, int64_t bytes) {
    walk(bytes, [&](char* piece, DType dtype, int64_t at, int64_t n) {
      if (dtype == travels_ && past_caches_) {
        loops().copy_nontemporal(source + at, n * width_, piece);
      } else if (dtype == travels_) {
        std::memcpy(piece, source + at, n * width_);
      } else {
        loops().convert(travels_, source + at, dtype, piece, n);
      }
    });
  }

  void skip(int64_t bytes) {
    walk(bytes, [](char*, DType, int64_t, int64_t) {});
  }

  // Where the next bytes are to be written, if they are contiguous, as they travel, and not past
  // the caches; else null.
  char* place(int64_t bytes) {
    const Piece& piece = pieces_[piece_];
    if (past_caches_ || piece.dtype != travels_ || (piece.elements - offset_) * width_ < bytes)
      return nullptr;
    char* const data = piece.data + offset_ * width_;
    skip(bytes);
    return data;
  }

  // At most the next `bytes`, contiguous: where they are, or together or rounded in `room`.
  struct Block {
    const char* data;
    int64_t bytes;
  };
  Block read(int64_t bytes, char* room) {
    const Piece& piece = pieces_[piece_];
    const int64_t here = (piece.elements - offset_) * width_;
    if (piece.dtype != travels_ || here < std::min(bytes, kSmallPiece)) {
      copy_to(room, bytes);
      return {room, bytes};
    }
    bytes = std::min(bytes, here);
    const char* data = piece.data + offset_ * width_;
    skip(bytes);
    return {data, bytes};
  }

  // Back to the start.
  void rewind() {
    left_ = all_;
    piece_ = 0;
    offset_ = 0;
  }

 private:
  // Smaller ones are moved together.
  static constexpr int64_t kSmallPiece = 2 << 10;

  struct Piece {
    char* data;
    DType dtype;
    int64_t elements;
  };

  // Calls copy(memory, its dtype, byte of the stream, elements) for each contiguous piece.
  template <typename Copy>
  void walk(int64_t bytes, const Copy& copy) {
    left_ -= bytes;
    for (int64_t done = 0; done < bytes;) {
      const Piece& piece = pieces_[piece_];
      const int64_t n = std::min(piece.elements - offset_, (bytes - done) / width_);
      copy(piece.data + offset_ * size_of(piece.dtype), piece.dtype, done, n);
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
  int64_t all_ = 0, left_ = 0;
  size_t piece_ = 0;
  int64_t offset_ = 0;  // elements of the piece
  bool past_caches_ = false;
};

// The inputs and outputs of an allreduce that travel in one dtype.
struct DTypeGroup {
  DType dtype;
  ByteCursor in, out;
};

// In the order in which the dtypes first occur; none without elements.
inline std::vector<DTypeGroup> by_dtype(const Request& request) {
  // So many bytes would not stay in the caches, and a normal store first reads what it overwrites.
  constexpr uint64_t kPastCaches = 32 << 20;
  const bool past_caches = input_bytes(request) >= kPastCaches;
  std::vector<DTypeGroup> groups;
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const int64_t n = elements(input.shape);
    if (n == 0) continue;
    const DType dtype = on_the_wire(request, input.dtype);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const DTypeGroup& known) { return known.dtype == dtype; });
    if (group == groups.end())
      group = groups.insert(group, {dtype, ByteCursor(dtype), ByteCursor(dtype)});
    group->in.add(input.data, input.dtype, n);
    group->out.add(request.outputs[i], input.dtype, n);
    if (past_caches && request.outputs[i] != input.data) group->out.write_past_caches();
  }
  return groups;
}

}  // namespace hvd
