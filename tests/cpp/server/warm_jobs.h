// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the processes of warm_main.cpp and the tests that start them have agreed on.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/blob_record.h"
#include "wire/job_record.h"
#include "wire/pool_record.h"

namespace penstock::server {

constexpr uint32_t kMadeRecordBytes = 10;
constexpr size_t kVersionOffset = 4;
constexpr uint16_t kOtherVersion = wire::kJobVersion + 8;

inline std::vector<std::byte> to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
inline std::string to_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The payload of each batch that is made, the record included.
inline std::vector<std::byte> made_batch() {
  return to_bytes(std::string(90, 'b') + std::string(kMadeRecordBytes, 'r'));
}

// A blob of that size. No eight bytes of it are those of another place.
inline std::vector<std::byte> made_blob(size_t size) {
  std::vector<uint64_t> numbers((size + 7) / 8);
  uint64_t next = size;
  for (uint64_t& number : numbers) number = next++;
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), numbers.data(), size);
  return bytes;
}

// What somebody who meets that version says of it.
inline std::string format_versions() {
  return "has version " + std::to_string(kOtherVersion) + ", but this process uses version " +
         std::to_string(wire::kJobVersion);
}

inline wire::BlobId blob_id_of(uint8_t value) {
  wire::BlobId id;
  id.fill(std::byte{value});
  return id;
}

}  // namespace penstock::server
