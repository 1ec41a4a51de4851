// SPDX-License-Identifier: Apache-2.0
#pragma once
// Settings of the thread and the process that change what operators compute. Workers have the defaults.

#include <optional>
#include <string>

namespace penstock::api {

// Which of them is not at its default, in words; none where all are.
std::optional<std::string> odd_surroundings();

}  // namespace penstock::api
