// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who can write to which memory of this process, according to the system's table of its mappings.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace penstock::worker {

enum class MemoryKind : uint8_t {
  kOwn,       // writes are visible only to this process
  kReadOnly,  // not writable here; a mapped file, or memory that the trainer has sealed
  kShared,    // another process may write there too
  kUnknown,   // not, or not entirely, mapped
};

// A snapshot of the table. Thread-compatible.
class ProcessMemory {
 public:
  // Reads the table of the calling process.
  static Result<ProcessMemory> read();
  // `table` has the format of /proc/self/maps.
  static Result<ProcessMemory> parse(std::string_view table);

  // The kind of a memory range. If it spans several mappings, the most permissive kind. Empty memory is read-only.
  MemoryKind kind_of(std::span<const std::byte> memory) const;

 private:
  struct Mapping {
    uint64_t begin = 0;
    uint64_t end = 0;
    MemoryKind kind = MemoryKind::kUnknown;
  };

  std::vector<Mapping> mappings_;  // by address, as the system lists them
};

}  // namespace penstock::worker
