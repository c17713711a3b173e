// Texts and numbers as bytes, and hashes of them, for messages between ranks of one build.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

// Makes bytes of numbers, texts, pairs, vectors, and structs that have
//
//   template <typename Bytes>
//   void fields(Bytes& bytes) { bytes(one_member, another); }  // for a Writer or a Reader
class Writer {
 public:
  template <typename... Values>
  void operator()(const Values&... values) {
    (put(values), ...);
  }
  std::string take() { return std::move(bytes_); }

 private:
  template <typename T>
  void put(const T& value) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else {
      const_cast<T&>(value).fields(*this);  // which does not change it
    }
  }
  void put(const std::string& text) {
    put(text.size());
    bytes_.append(text);
  }
  template <typename T>
  void put(const std::vector<T>& values) {
    put(values.size());
    for (const T& value : values) put(value);
  }
  template <typename A, typename B>
  void put(const std::pair<A, B>& values) {
    put(values.first);
    put(values.second);
  }

  std::string bytes_;
};

// Reads what a Writer wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename... Values>
  void operator()(Values&... values) {
    (get(values), ...);
  }

 private:
  template <typename T>
  void get(T& value) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      std::memcpy(&value, next(sizeof value), sizeof value);
    } else {
      value.fields(*this);
    }
  }
  void get(std::string& text) {
    size_t size = 0;
    get(size);
    text.assign(next(size), size);
  }
  template <typename T>
  void get(std::vector<T>& values) {
    size_t size = 0;
    for (get(size); size > 0; --size) get(values.emplace_back());
  }
  template <typename A, typename B>
  void get(std::pair<A, B>& values) {
    get(values.first);
    get(values.second);
  }
  const char* next(size_t size) {
    if (bytes_.size() - position_ < size) throw std::runtime_error("a rank's message is cut short");
    return bytes_.data() + std::exchange(position_, position_ + size);
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

template <typename T>
std::string encode(const T& value) {
  Writer out;
  out(value);
  return out.take();
}

template <typename T>
T decode(const std::string& bytes) {
  Reader in(bytes);
  T value;
  in(value);
  return value;
}

}  // namespace hvd
