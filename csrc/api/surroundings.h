// SPDX-License-Identifier: Apache-2.0
#pragma once
// Thread and process settings that change the results of operators. Workers use the defaults.

#include <optional>
#include <string>

namespace penstock::api {

// A description of a setting that is not at its default; none if all are.
std::optional<std::string> odd_surroundings();

}  // namespace penstock::api
