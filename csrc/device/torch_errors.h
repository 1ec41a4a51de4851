// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls torch from code whose errors are Results: torch throws.

#include <c10/util/Exception.h>

#include <exception>

#include "base/result.h"

namespace penstock::device {

// Runs a call that returns a Result. Returns kNoMemory if a device has none left.
template <typename Call>
auto caught(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const c10::OutOfMemoryError& error) {
    return Fault{Errc::kNoMemory, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return Fault{Errc::kFailed, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return Fault{Errc::kFailed, error.what()};
  }
}

}  // namespace penstock::device
