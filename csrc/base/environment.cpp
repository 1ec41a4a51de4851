// SPDX-License-Identifier: Apache-2.0
#include "base/environment.h"

#include <limits.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

namespace penstock {

std::optional<std::string> environment(const char* variable) {
  const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): nothing here sets variables
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), HOST_NAME_MAX);
  return host.data();
}

}  // namespace penstock
