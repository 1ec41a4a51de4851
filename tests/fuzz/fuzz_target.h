// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fuzz target is three functions around one parser, in a file <parser>_fuzz.cpp. fuzz_target.cpp hands them to
// libFuzzer.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace penstock::fuzz {

using Bytes = std::vector<std::byte>;

// The random choices of one mutation; the same seed gives the same ones.
class Choices {
 public:
  explicit Choices(uint32_t seed) : random_(seed) {}

  // A number below `count`, which is not 0.
  size_t below(size_t count) { return random_() % count; }

  // For what a mutation puts right: now and then it leaves it, so that the check of it is reached as well.
  bool mostly() { return below(16) != 0; }

  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }

 private:
  std::minstd_rand random_;
};

// ---- The functions that a target defines

// Inputs to begin with, made by penstock's own writers.
std::vector<Bytes> make_seeds();

// Changes an input, and mostly repairs the fields that the parser checks first, so that the change is seen further in.
void mutate(Bytes& bytes, Choices& choices);

// Parses the input, uses the result as a receiver would, and checks the promises of the parser. Returns whether the
// parser accepted it, as it must accept each seed.
bool check(std::span<const std::byte> bytes);

// ---- The functions that a target may call

// libFuzzer's own mutation: bits, bytes, numbers, and pieces of other inputs.
void edit_at_random(Bytes& bytes);

// Ends the run, with `bytes` as the input that did it, when a promise was not kept.
void expect(bool is_kept, const char* promise);

// Expects that an error has a text, and returns false.
bool is_refused(std::string_view message);

// Reads both ends of `bytes`, which the address sanitizer checks.
void touch(std::span<const std::byte> bytes);

// `value`, mostly brought down to at most `most`.
template <typename T>
T mostly_at_most(T value, T most, Choices& choices) {
  return value > most && choices.mostly() ? static_cast<T>(value % (most + 1)) : value;
}

}  // namespace penstock::fuzz
