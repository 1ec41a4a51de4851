// SPDX-License-Identifier: Apache-2.0
#pragma once
// The fixed-length head at the start of a message: a struct whose first fields are `magic`, `version` and `kind`.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/malformed.h"

namespace penstock::wire {

struct HeadRules {
  uint32_t magic = 0;
  uint16_t version = 0;
  uint8_t kind_max = 0;
  std::string_view subject{};  // names the message, as for malformed()
  std::string_view remedy = "run the same version of penstock on both sides";
};

// The head of `part`, with its magic, version, length and kind checked against `rules`. kMismatch for another version.
template <typename Head>
Result<Head> read_head(std::span<const std::byte> part, const HeadRules& rules) {
  Head head;
  // The head of another version may be shorter, so the version is checked first.
  if (!part.empty()) std::memcpy(&head, part.data(), std::min(part.size(), sizeof head));
  const bool is_ours = head.magic == rules.magic;
  if (is_ours && head.version != rules.version) {
    return Fault{Errc::kMismatch, std::string(rules.subject) + " has version " + std::to_string(head.version) +
                                      ", but this process uses version " + std::to_string(rules.version) + "; " +
                                      std::string(rules.remedy)};
  }
  if (part.size() < sizeof head) return malformed(rules.subject, std::to_string(part.size()) + " bytes long");
  if (!is_ours) return malformed(rules.subject, "its magic number is wrong");
  if (head.kind == 0 || head.kind > rules.kind_max)
    return malformed(rules.subject, "unknown kind " + std::to_string(head.kind));
  return head;
}

// The head followed by its bodies.
template <typename Head>
std::vector<std::byte> message_of(const Head& head, std::initializer_list<std::span<const std::byte>> bodies) {
  size_t size = sizeof head;
  for (const auto body : bodies) size += body.size();
  std::vector<std::byte> part(size);
  std::memcpy(part.data(), &head, sizeof head);
  size_t end = sizeof head;
  for (const auto body : bodies) {
    if (!body.empty()) std::memcpy(part.data() + end, body.data(), body.size());
    end += body.size();
  }
  return part;
}

}  // namespace penstock::wire
