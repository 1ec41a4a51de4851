// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the process was given by those who started it.

#include <optional>
#include <string>

namespace penstock {

// The value of an environment variable; none for one that is not set. Nothing in this process may set variables while
// other threads ask for them.
std::optional<std::string> environment(const char* variable);

// The name of this machine, for people.
std::string host_name();

}  // namespace penstock
