// Tests, whose checks count failures and go on, so that one run shows what else is wrong.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace hvd::test {

constexpr int kShown = 20;  // a wrong loop must not flood the screen

inline std::atomic<int> failures{0};
inline thread_local std::string context;  // of a check within a loop

template <typename T>
std::string shown(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<int>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    out << +value;  // an int8_t is a number, no character
  } else {
    out << value;
  }
  return out.str();
}

inline bool report(bool ok, const char* file, int line, const std::string& what) {
  if (ok) return true;
  if (++failures <= kShown) {
    std::printf("%s:%d: %s%s%s\n", file, line, what.c_str(), context.empty() ? "" : "; ",
                context.c_str());
    std::fflush(stdout);
  }
  return false;
}

struct Test {
  std::string name;
  void (*function)();
};

// Those that TEST defines, in this order.
inline std::vector<Test> all_tests;

inline bool add_test(std::string name, void (*function)()) {
  std::replace(name.begin(), name.end(), '_', ' ');
  all_tests.push_back({name, function});
  return true;
}

// The exit status of a test program.
inline int run(const std::vector<Test>& tests = all_tests) {
  for (const Test& test : tests) {
    const int before = failures;
    context.clear();
    test.function();
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", test.name.c_str());
    std::fflush(stdout);
  }
  if (failures) std::printf("%d checks failed\n", failures.load());
  return failures ? 1 : 0;
}

// Calls a body with 0, 1, … in so many threads, and waits for all.
inline void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hvd::test

// TEST(what_it_shows) { … }
#define TEST(name)                                               \
  void name();                                                   \
  const bool name##_is_added = hvd::test::add_test(#name, name); \
  void name()

#define CHECK(condition) \
  hvd::test::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

#define CHECK_EQ(a, b)                                                          \
  [&](const auto& x, const auto& y) {                                           \
    if (x == y) return true;                                                    \
    return hvd::test::report(                                                   \
        false, __FILE__, __LINE__,                                              \
        #a " is " + hvd::test::shown(x) + ", expected " + hvd::test::shown(y)); \
  }(a, b)

#define CHECK_CONTAINS(text, part)                                                      \
  [&](const std::string& all, const std::string& wanted) {                              \
    return hvd::test::report(all.find(wanted) != std::string::npos, __FILE__, __LINE__, \
                             "'" + wanted + "' is not in: " + all);                     \
  }(text, part)
