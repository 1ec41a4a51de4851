// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory of a worker process: who can write to which part of it (ProcessMemory), and the settings of malloc
// (tune_malloc).

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

// Who can write to which memory of this process, according to the system's table of its mappings. A snapshot of the
// table. Thread-compatible.
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

// Keeps freed memory in this process's heap. For worker processes only; the trainer's process is the user's.
// Thread-safe.
//
// A worker allocates the same large blocks for every batch. With glibc's defaults each block above 32 MB is mapped and
// unmapped again, and each trim of the heap returns pages to the system, so every batch has page faults for memory that
// the process had a moment before. Avoiding this is worth 2x to 4x on image transforms, more than any change to the
// code that runs them.
void tune_malloc();

}  // namespace penstock::worker
