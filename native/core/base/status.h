// The result of an operation: ok, or what went wrong and what to do about it.
#pragma once

#include <string>
#include <utility>

namespace hvd {

enum class Code {
  ok,
  invalid_argument,
  failed_precondition,
  unimplemented,
  aborted,
  deadline_exceeded,
  internal
};

struct Status {
  Code code = Code::ok;
  std::string message;

  bool ok() const { return code == Code::ok; }
  static Status error(Code code, std::string message) { return {code, std::move(message)}; }
};

}  // namespace hvd
