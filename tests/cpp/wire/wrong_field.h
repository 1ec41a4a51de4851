// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records that are right but for one field, and tables of them that have a case for each byte of a record.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace penstock::wire {

// A field, by its place in a record, and the value that it is given.
struct WrongField {
  const char* name;
  size_t offset;
  size_t bytes;
  uint64_t value;  // repeated in a field of more than 8 bytes
};

constexpr uint64_t kAllBits = ~uint64_t{0};

inline void write_field(std::span<std::byte> record, const WrongField& field) {
  ASSERT_LE(field.offset + field.bytes, record.size());
  for (size_t place = 0; place < field.bytes; place += sizeof field.value)
    std::memcpy(record.data() + field.offset + place, &field.value, std::min(sizeof field.value, field.bytes - place));
}

// Whether the fields, in the order of their places, leave out no byte of a record.
constexpr bool are_all(std::span<const WrongField> fields, size_t record_bytes) {
  size_t end = 0;
  for (const WrongField& field : fields) {
    if (field.offset > end) return false;
    end = std::max(end, field.offset + field.bytes);
  }
  return end == record_bytes;
}

// Runs every case by itself, several at once, since they wait most of the time. A failure names its case.
template <typename Case>
void run_cases(std::span<const Case> cases, const std::function<void(const Case&)>& run) {
  constexpr size_t kAtOnce = 12;  // each has some fifty descriptors
  std::atomic<size_t> next{0};
  std::vector<std::jthread> threads;
  for (size_t count = 0; count < std::min(kAtOnce, cases.size()); ++count) {
    threads.emplace_back([&] {
      for (size_t index = next.fetch_add(1); index < cases.size(); index = next.fetch_add(1)) {
        SCOPED_TRACE(std::string("wrong: ") + cases[index].name);
        run(cases[index]);
      }
    });
  }
}
inline void run_fields(std::span<const WrongField> fields, const std::function<void(const WrongField&)>& run) {
  run_cases<WrongField>(fields, run);
}

}  // namespace penstock::wire
