// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's wait for its native thread: without the interpreter lock, and in slices, so that signals are handled
// meanwhile.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/instant.h"
#include "bindings/raise.h"

namespace penstock::bindings {

inline constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // maximum delay until a signal is handled

// Returns the result of `ask(until)`, or no value at the deadline. `ask` waits at most until its argument and
// returns kTimeout if no result arrived. `raise` (raise_error or raise_failure) throws every other error.
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
