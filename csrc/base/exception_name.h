// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace penstock {

// The type of the exception that is being handled, as C++ writes it: "std::out_of_range". To be called in a catch
// block.
std::string current_exception_name();
// What it says of itself.
std::string current_exception_text();

}  // namespace penstock
