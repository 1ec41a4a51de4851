// SPDX-License-Identifier: Apache-2.0
#pragma once
// The boundary between Results and exceptions: the one table from error codes to Python exceptions. Codes with a class
// in penstock.errors raise it; mistakes of the caller are ValueErrors.

#include <pybind11/pybind11.h>

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

}  // namespace penstock::bindings
