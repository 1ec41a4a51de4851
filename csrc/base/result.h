// SPDX-License-Identifier: Apache-2.0
#pragma once
// How code reports that it failed. A call that can fail in a healthy system returns a Result: a value, or an error with
// a code and a sentence. Code below the bindings does not throw for an expected event; the bindings turn the code into
// a Python exception. PENSTOCK_ASSERT is for facts that hold unless penstock itself has a bug.

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

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

// Throws AssertionFailure unless `condition` holds. Stays on in release builds: a wrong batch is worse than a training
// run that stops.
#define PENSTOCK_ASSERT(condition, ...)                                                      \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::penstock::fail_assertion(#condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

namespace penstock {

enum class Errc : uint8_t {
  kMalformed,    // bytes or text that do not follow their grammar
  kTooLarge,     // a length above its cap
  kTimeout,      // the deadline has passed
  kClosed,       // the peer or the queue is closed
  kNoMemory,     // the system has no room for an arena, a mapping or a descriptor
  kUnsupported,  // well formed, but not supported by this build
  kMismatch,     // a value does not have the dtype, shape or version that was agreed
  kFailed,       // the work itself failed; the message has the cause
};

// The name of a code as it appears in messages, such as "malformed".
constexpr std::string_view errc_name(Errc code) {
  switch (code) {
    case Errc::kMalformed: return "malformed";
    case Errc::kTooLarge: return "too large";
    case Errc::kTimeout: return "timeout";
    case Errc::kClosed: return "closed";
    case Errc::kNoMemory: return "no memory";
    case Errc::kUnsupported: return "unsupported";
    case Errc::kMismatch: return "mismatch";
    case Errc::kFailed: return "failed";
  }
  return "unknown";
}

struct Fault {
  Errc code;
  std::string message;  // the failure, the seen and the expected facts, and the remedy

  friend bool operator==(const Fault&, const Fault&) = default;
};

// A value of type T, or a Fault. Reading the absent side is a bug in penstock and asserts.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Fault error) : state_(std::in_place_index<1>, std::move(error)) {}

  explicit operator bool() const { return state_.index() == 0; }

  T& value() & {
    PENSTOCK_ASSERT(state_.index() == 0, "value() of a failed result: ", error().message);
    return std::get<0>(state_);
  }
  const T& value() const& {
    PENSTOCK_ASSERT(state_.index() == 0, "value() of a failed result: ", error().message);
    return std::get<0>(state_);
  }
  T&& value() && {
    PENSTOCK_ASSERT(state_.index() == 0, "value() of a failed result: ", error().message);
    return std::get<0>(std::move(state_));
  }

  const Fault& error() const {
    PENSTOCK_ASSERT(state_.index() == 1, "error() of a result that succeeded");
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Fault> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Fault error) : error_(std::move(error)) {}

  explicit operator bool() const { return !error_.has_value(); }

  const Fault& error() const {
    PENSTOCK_ASSERT(error_.has_value(), "error() of a result that succeeded");
    return *error_;
  }

 private:
  std::optional<Fault> error_;
};

}  // namespace penstock
