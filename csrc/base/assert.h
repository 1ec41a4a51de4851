// SPDX-License-Identifier: Apache-2.0
#pragma once
// Assertions of facts that hold unless penstock itself has a bug. They stay on in release builds: a wrong batch is
// worse than a training run that stops.

#include <sstream>
#include <stdexcept>
#include <string>

namespace penstock {

// A bug in penstock. Python sees it as RuntimeError.
class AssertionFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail_assertion(const char* condition, const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  text << "penstock internal assertion failed: " << condition << " at " << file << ":" << line << ". ";
  ((text << parts), ...);
  text << " This is a bug in penstock, not in your program; please report it in the penstock issue tracker.";
  throw AssertionFailure(text.str());
}

}  // namespace penstock

#define PENSTOCK_ASSERT(condition, ...)                                                      \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::penstock::fail_assertion(#condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
