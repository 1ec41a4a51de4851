// SPDX-License-Identifier: Apache-2.0
#include "worker/process_memory.h"

#include <features.h>  // defines __GLIBC__, which no other header here does

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>

#include <climits>
#endif

namespace penstock::worker {
namespace {

// Reads a hexadecimal address and the character after it from the front of `text`.
bool take_address(std::string_view& text, char end, uint64_t& address) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), address, 16);
  const auto length = static_cast<size_t>(rest - text.data());
  if (error != std::errc() || length == text.size() || *rest != end) return false;
  text.remove_prefix(length + 1);
  return true;
}

// From the four characters such as "rw-p".
MemoryKind kind_from(std::string_view permissions) {
  if (permissions[1] != 'w') return MemoryKind::kReadOnly;
  return permissions[3] == 's' ? MemoryKind::kShared : MemoryKind::kOwn;
}

}  // namespace

Result<ProcessMemory> ProcessMemory::read() {
  std::ifstream file("/proc/self/maps");
  const std::string table(std::istreambuf_iterator<char>(file), {});
  if (table.empty()) return Fault{Errc::kUnsupported, "/proc/self/maps cannot be read; mount /proc"};
  return parse(table);
}

Result<ProcessMemory> ProcessMemory::parse(std::string_view table) {
  ProcessMemory memory;
  while (!table.empty()) {
    std::string_view line = table.substr(0, table.find('\n'));
    table.remove_prefix(std::min(table.size(), line.size() + 1));
    Mapping mapping;
    const bool has_addresses = take_address(line, '-', mapping.begin) && take_address(line, ' ', mapping.end);
    if (!has_addresses || line.size() < 4)
      return Fault{Errc::kMalformed, "a line of /proc/self/maps does not have the form \"start-end permissions ...\""};
    mapping.kind = kind_from(line);
    memory.mappings_.push_back(mapping);
  }
  return memory;
}

MemoryKind ProcessMemory::kind_of(std::span<const std::byte> memory) const {
  auto kind = MemoryKind::kReadOnly;
  if (memory.empty()) return kind;
  auto begin = reinterpret_cast<uint64_t>(memory.data());
  const uint64_t end = begin + memory.size();
  auto mapping = std::ranges::upper_bound(mappings_, begin, {}, &Mapping::end);
  for (; begin < end; begin = mapping->end, ++mapping) {
    if (mapping == mappings_.end() || mapping->begin > begin) return MemoryKind::kUnknown;
    if (mapping->kind == MemoryKind::kShared) return mapping->kind;
    if (mapping->kind == MemoryKind::kOwn) kind = mapping->kind;
  }
  return kind;
}

void tune_malloc() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, INT_MAX);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace penstock::worker
