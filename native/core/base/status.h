// The result of an operation: ok, or what went wrong and what to do about it.
#pragma once

#include <string>
#include <utility>

namespace hvd {

// As TensorFlow and XLA number them.
enum class Code {
  ok = 0,
  invalid_argument = 3,
  deadline_exceeded = 4,
  failed_precondition = 9,
  aborted = 10,
  internal = 13
};

struct Status {
  Code code = Code::ok;
  std::string message;

  bool ok() const { return code == Code::ok; }
  static Status error(Code code, std::string message) { return {code, std::move(message)}; }
};

}  // namespace hvd
