// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's wait for its native thread: without the interpreter lock, and in slices, so that signals are seen
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

inline constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // how late a signal may be seen

// The result of `ask(until)`, or nothing at the deadline. `ask` waits until then at most and gives kTimeout when
// nothing came. `raise` (raise_error or raise_failure) throws every other error.
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
