// SPDX-License-Identifier: Apache-2.0
#pragma once
// Changes IR text by its words and lines, and makes values defined before they are used again.

#include <string>
#include <string_view>

#include "fuzz_target.h"

namespace penstock::fuzz {

std::string edit_ir_text(std::string_view text, Choices& choices);

}  // namespace penstock::fuzz
