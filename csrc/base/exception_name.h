// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace penstock {

// The type of the current exception as written in C++: "std::out_of_range". Call it in a catch block.
std::string current_exception_name();
// The message of the current exception.
std::string current_exception_text();

}  // namespace penstock
