// SPDX-License-Identifier: Apache-2.0
#include "api/memory_caps.h"

#include <charconv>
#include <string>

#include "base/environment.h"

namespace penstock::api {
namespace {

constexpr uint64_t kDefaultArenaBytes = 256ULL << 20;
constexpr uint64_t kDefaultJobBytes = 64ULL << 30;

Result<uint64_t> bytes_of(const char* variable, uint64_t otherwise) {
  const auto given = environment(variable);
  if (!given) return otherwise;
  const std::string& text = *given;
  uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || end != text.data() + text.size() || bytes == 0) {
    return Fault{Errc::kMalformed, std::string(variable) + " is '" + text +
                                       "', but must be a positive number of bytes, such as " +
                                       std::to_string(otherwise)};
  }
  return bytes;
}

}  // namespace

Result<uint64_t> arena_bytes() { return bytes_of("PENSTOCK_ARENA_BYTES", kDefaultArenaBytes); }
Result<uint64_t> job_bytes() { return bytes_of("PENSTOCK_JOB_BYTES", kDefaultJobBytes); }

}  // namespace penstock::api
