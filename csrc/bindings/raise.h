// SPDX-License-Identifier: Apache-2.0
#pragma once
// The boundary between Results and exceptions, and between code with and without the interpreter lock. The one table
// from error codes to Python exceptions is here: codes with a class in penstock.errors raise it; mistakes of the caller
// are ValueErrors.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/clock.h"
#include "base/result.h"

namespace penstock::bindings {

[[noreturn]] void raise_error(const Fault& error);
// Raises a failure between processes, for which no argument of the caller is at fault: never a ValueError.
[[noreturn]] void raise_failure(const Fault& error);

template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise_error(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

// Call without the interpreter lock, before taking it again: during finalization, Python ends a thread that requests
// the lock by unwinding it, which aborts the process in C++ frames. Such a thread blocks here until the process is
// gone. The main thread, which finalizes the interpreter, continues.
void stay_if_python_exits();

// Runs `work` without the interpreter lock. Errors are Results, which the caller unwraps with the lock held again. The
// lock is not retaken in a destructor: during finalization, Python unwinds a thread that waits for the lock, and
// unwinding out of a destructor aborts the process.
template <typename Work>
auto without_gil(Work work) {
  PyThreadState* const state = PyEval_SaveThread();
  auto result = [&] {
    try {
      return work();
    } catch (...) {
      PyEval_RestoreThread(state);
      throw;
    }
  }();
  PyEval_RestoreThread(state);
  return result;
}

inline constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // maximum delay until a signal is handled

// Returns the result of `ask(until)`, a worker's wait for its native thread, or no value at the deadline. Waits without
// the interpreter lock, and in slices, so that signals are handled meanwhile: `ask` waits at most until its argument
// and returns kTimeout if no result arrived. `raise` (raise_error or raise_failure) throws every other error.
template <typename Ask>
auto wait_for(double timeout_s, void (*raise)(const Fault&), Ask ask)
    -> std::optional<std::decay_t<decltype(ask(std::chrono::steady_clock::now()).value())>> {
  using std::chrono::steady_clock;
  const auto deadline = steady_clock::now() + duration_of(timeout_s);
  for (;;) {
    auto result = without_gil([&] { return ask(std::min(deadline, steady_clock::now() + kSignalInterval)); });
    if (result) return std::move(result).value();
    if (result.error().code != Errc::kTimeout) raise(result.error());
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (steady_clock::now() >= deadline) return std::nullopt;
  }
}

}  // namespace penstock::bindings
