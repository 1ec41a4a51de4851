// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fixture with random numbers. A test that fails prints its seed; PENSTOCK_TEST_SEED=... runs the same again.

#include <gtest/gtest.h>

#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

namespace penstock::test {

class SeededTest : public testing::Test {
 protected:
  SeededTest() {
    const char* given = std::getenv("PENSTOCK_TEST_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    random_.seed(seed_);
  }
  ~SeededTest() override {
    if (HasFailure()) std::cout << "PENSTOCK_TEST_SEED=" << seed_ << std::endl;
  }

  // A number in [low, high].
  template <std::integral T>
  T draw(T low, T high) {
    return std::uniform_int_distribution<T>(low, high)(random_);
  }
  bool toss() { return draw(0, 1) == 1; }
  uint64_t seed() const { return seed_; }
  std::mt19937_64& random() { return random_; }

 private:
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
};

}  // namespace penstock::test
