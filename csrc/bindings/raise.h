// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a Result ends and an exception begins: the one table from error codes to Python's exceptions. Codes that have a
// class in penstock.errors raise it; the caller's own mistakes are ValueError.

#include <pybind11/pybind11.h>

#include "base/result.h"

namespace penstock::bindings {

[[noreturn]] void raise_error(const Fault& error);
// Raises a failure between processes, where no argument of the caller's is at fault: never a ValueError.
[[noreturn]] void raise_failure(const Fault& error);

template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise_error(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

// Called without the interpreter lock before it is taken again: once the interpreter is going down, Python ends a
// thread that asks for the lock by unwinding it, which aborts the process in C++ frames. Such a thread stays here
// instead until the process is gone. The main thread, which is the one that takes the interpreter down, goes on.
void stay_if_python_exits();

// Runs `work` without the interpreter lock. Errors are Results, which the caller unwraps with the lock held again.
// The lock is not taken back in a destructor: Python unwinds a thread that waits for the lock when the interpreter goes
// down, and unwinding out of a destructor aborts the process.
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
