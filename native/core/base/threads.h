// What threads bring into the core, and what the core's own threads must not take from the process.
#pragma once

#include <cfenv>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hvd {

// While it lives, this thread takes no signals but those of its own faults.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A thread that takes no signals; the first 15 bytes of its name are shown by debuggers.
std::thread new_thread(const std::string& name, std::function<void()> body);

// While it lives, this thread rounds to nearest and keeps subnormal numbers. TensorFlow's threads
// flush these to zero; sums must not depend on the thread that computes them.
class StandardArithmetic {
 public:
  StandardArithmetic(const StandardArithmetic&) = delete;
#if defined(__SSE2__)
  StandardArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardArithmetic() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  StandardArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
};

}  // namespace hvd
