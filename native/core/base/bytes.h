// Texts and numbers as bytes, and hashes of them, for messages between ranks of one build.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace hvd {

// FNV-1a (Fowler, Noll, Vo; http://www.isthe.com/chongo/tech/comp/fnv/) over 64-bit words, with a
// final mix.
class Hash {
 public:
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3ULL;
    state_ ^= state_ >> 29;  // FNV alone never mixes high bits into low ones
  }
  void add(double value) {
    uint64_t word;
    std::memcpy(&word, &value, sizeof word);
    add(word);
  }
  void add(const std::string& text) {
    add(static_cast<uint64_t>(text.size()));
    for (unsigned char c : text) add(static_cast<uint64_t>(c));
  }
  uint64_t value() const { return state_ < 2 ? state_ + 2 : state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

class Writer {
 public:
  template <typename... Values>
  void operator()(const Values&... values) {
    (put(values), ...);
  }
  std::string take() { return std::move(bytes_); }

 private:
  template <typename T>
  void put(const T& number) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  void put(const std::string& text) {
    put(text.size());
    bytes_.append(text);
  }

  std::string bytes_;
};

// Reads what a Writer wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  bool at_end() const { return position_ == bytes_.size(); }

  template <typename... Values>
  void operator()(Values&... values) {
    (get(values), ...);
  }

 private:
  template <typename T>
  void get(T& number) {
    std::memcpy(&number, next(sizeof number), sizeof number);
  }
  void get(std::string& text) {
    size_t size = 0;
    get(size);
    text.assign(next(size), size);
  }
  const char* next(size_t size) {
    if (bytes_.size() - position_ < size) throw std::runtime_error("a rank's message is cut short");
    return bytes_.data() + std::exchange(position_, position_ + size);
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

}  // namespace hvd
