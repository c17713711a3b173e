// Texts and numbers as bytes, for messages between ranks of one build.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace hvd {

class Writer {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& text) {
    number<uint64_t>(text.size());
    bytes_.append(text);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what a Writer wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  bool at_end() const { return position_ == bytes_.size(); }

  template <typename T>
  T number() {
    T value;
    read(sizeof value, &value);
    return value;
  }
  std::string text() {
    std::string text(number<uint64_t>(), '\0');
    read(text.size(), text.data());
    return text;
  }

 private:
  void read(size_t size, void* out) {
    if (bytes_.size() - position_ < size) throw std::runtime_error("a rank's message is cut short");
    std::memcpy(out, bytes_.data() + position_, size);
    position_ += size;
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

}  // namespace hvd
