// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes as text: base64 with padding (RFC 4648, section 4).

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

std::string to_base64(std::span<const std::byte> bytes);
// Returns none for text that is not base64.
std::optional<std::vector<std::byte>> from_base64(std::string_view text);

}  // namespace penstock
