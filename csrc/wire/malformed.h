// SPDX-License-Identifier: Apache-2.0
#pragma once
// The fault of bytes that violate their grammar.

#include <string>
#include <string_view>
#include <utility>

#include "base/result.h"

namespace penstock::wire {

// `subject` names the bytes, such as "a request"; `reason` describes the violation.
inline Fault malformed(std::string_view subject, std::string_view reason) {
  std::string message(subject);
  message += " is malformed: ";
  message += reason;
  message += "; the processes of a job must run the same version of penstock";
  return {Errc::kMalformed, std::move(message)};
}

}  // namespace penstock::wire
