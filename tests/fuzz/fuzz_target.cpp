// SPDX-License-Identifier: Apache-2.0
// libFuzzer's entry points. Besides libFuzzer's own options, `--write-seeds FOLDER` writes the seeds and ends.
#include "fuzz_target.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t size_max);

namespace penstock::fuzz {

void edit_at_random(Bytes& bytes) {
  const size_t size = bytes.size();
  bytes.resize(size + 64);  // how much one edit may add
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), size, bytes.size()));
}

void expect(bool is_kept, const char* promise) {
  if (is_kept) return;
  std::fprintf(stderr, "==== a promise was not kept: %s\n", promise);
  std::abort();
}

bool is_refused(std::string_view message) {
  expect(!message.empty(), "an error says what is wrong");
  return false;
}

void touch(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  volatile std::byte seen = *bytes.data();
  seen = *(bytes.data() + bytes.size() - 1);
  static_cast<void>(seen);
}

namespace {

void write_seeds(const std::string& folder) {
  size_t number = 0;
  for (const Bytes& seed : make_seeds()) {
    if (!check(seed)) {
      std::fprintf(stderr, "==== the parser refused seed %zu; do the small caps in CMakeLists.txt fit it?\n", number);
      std::exit(1);
    }
    std::ofstream file(folder + "/seed-" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    file.close();
    if (!file) std::exit(1);
  }
}

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerInitialize(int* argument_count, char*** arguments) {
  if (*argument_count == 3 && std::string_view((*arguments)[1]) == "--write-seeds") {
    penstock::fuzz::write_seeds((*arguments)[2]);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  penstock::fuzz::check(std::as_bytes(std::span(data, size)));
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max, unsigned int seed) {
  const auto given = std::as_bytes(std::span(data, size));
  penstock::fuzz::Bytes bytes(given.begin(), given.end());
  penstock::fuzz::Choices choices(seed);
  penstock::fuzz::mutate(bytes, choices);
  const size_t kept = std::min(bytes.size(), size_max);
  if (kept > 0) std::memcpy(data, bytes.data(), kept);
  return kept;
}
