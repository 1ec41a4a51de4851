// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one table that converts the results of the rooms below into exceptions of the public library.

#include <string>

#include "base/result.h"
#include "loader/batch.h"
#include "penstock/error.h"

namespace penstock::api {

[[noreturn]] void raise(const Fault& fault);
// Raises the error for an invalid argument.
[[noreturn]] void refuse(const std::string& text);

// Raises "Caught ValueError in DataLoader worker thread 0.", worded like torch's DataLoader, followed by the thrown
// exception. `place` is how an error names the worker (WorkerSet::place_of).
[[noreturn]] void raise_remote(const loader::BatchRecord::RemoteError& remote, std::string place);

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result) raise(result.error());
  return std::move(result).value();
}
inline void check(const Result<void>& result) {
  if (!result) raise(result.error());
}

}  // namespace penstock::api
