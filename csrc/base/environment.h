// SPDX-License-Identifier: Apache-2.0
#pragma once
// The environment of the process.

#include <optional>
#include <string>

namespace penstock {

// The value of an environment variable; none if it is not set. This process must not set variables while other threads
// read them.
std::optional<std::string> environment(const char* variable);

// The name of this machine, for display.
std::string host_name();

}  // namespace penstock
