// SPDX-License-Identifier: Apache-2.0
#include "runtime/compiled_prefix.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/result.h"

namespace penstock::runtime {
namespace {

// A float32 tensor of these very bits.
at::Tensor of_bits(const std::vector<int32_t>& bits) { return at::tensor(bits, at::kInt).view(at::kFloat); }

constexpr int32_t kQuietNan = 0x7fc00000;
constexpr int32_t kOtherNan = 0x7fc00001;
constexpr int32_t kNegativeZero = INT32_MIN;

TEST(SameBits, ACopyIsTheSame) {
  const at::Tensor numbers = at::arange(12, at::kFloat).view({3, 4});
  EXPECT_TRUE(is_same_bits(numbers, numbers.clone()));
  EXPECT_FALSE(is_same_bits(numbers, numbers + 1));
}

TEST(SameBits, ANanIsItselfAndNoNanOfAnotherPayload) {
  EXPECT_TRUE(is_same_bits(of_bits({kQuietNan, 0}), of_bits({kQuietNan, 0})));
  EXPECT_FALSE(is_same_bits(of_bits({kQuietNan, 0}), of_bits({kOtherNan, 0})));
}

TEST(SameBits, ZerosOfOtherSignsDiffer) {
  const at::Tensor zero = of_bits({0});
  const at::Tensor negative = of_bits({kNegativeZero});
  ASSERT_TRUE(at::equal(zero, negative));
  EXPECT_FALSE(is_same_bits(zero, negative));
}

TEST(SameBits, EqualValuesOfAnotherLayoutDiffer) {
  const at::Tensor rows = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor columns = rows.t().contiguous().t();
  ASSERT_TRUE(at::equal(rows, columns));
  EXPECT_FALSE(is_same_bits(rows, columns));
  EXPECT_TRUE(is_same_bits(columns, rows.t().contiguous().t()));
}

TEST(SameBits, WhatLiesBetweenElementsDoesNotCount) {
  const at::Tensor a = at::arange(8, at::kFloat).view({4, 2});
  const at::Tensor b = a.clone();
  b.select(1, 1).fill_(-1);
  EXPECT_TRUE(is_same_bits(a.select(1, 0), b.select(1, 0)));
  EXPECT_FALSE(is_same_bits(a.select(1, 1), b.select(1, 1)));
}

TEST(SameBits, TensorsWithoutElementsAreToldBySizesAndStrides) {
  EXPECT_TRUE(is_same_bits(at::empty({0, 3}), at::empty({0, 3})));
  EXPECT_FALSE(is_same_bits(at::empty({0, 3}), at::empty({3, 0})));
  EXPECT_FALSE(is_same_bits(at::empty({0, 3}), at::empty({3, 0}).t()));
}

TEST(SameBits, TheSameBytesOfAnotherDtypeDiffer) {
  const at::Tensor numbers = at::zeros({4}, at::kInt);
  EXPECT_FALSE(is_same_bits(numbers, numbers.view(at::kFloat)));
}

TEST(SameBits, APendingConjugationDiffersFromItsResult) {
  const at::Tensor numbers = at::complex(at::ones({3}), at::ones({3}));
  ASSERT_TRUE(numbers.conj().is_conj());
  EXPECT_FALSE(is_same_bits(numbers.conj(), numbers.conj().resolve_conj()));
  EXPECT_FALSE(is_same_bits(numbers.conj(), numbers));
  EXPECT_TRUE(is_same_bits(numbers.conj(), numbers.clone().conj()));
}

TEST(SameBits, ListsAreTheSameOneByOne) {
  const std::vector<at::Tensor> one = {at::ones({2}), at::zeros({3})};
  const std::vector<at::Tensor> same = {at::ones({2}), at::zeros({3})};
  const std::vector<at::Tensor> fewer = {at::ones({2})};
  const std::vector<at::Tensor> others = {at::ones({2}), at::ones({3})};
  EXPECT_TRUE(is_same_bits(one, same));
  EXPECT_FALSE(is_same_bits(one, fewer));
  EXPECT_FALSE(is_same_bits(one, others));
  EXPECT_TRUE(is_same_bits(std::vector<at::Tensor>(), std::vector<at::Tensor>()));
}

TEST(SameBits, MemoryOfADeviceIsNotRead) {
  const at::Tensor elsewhere = at::empty({2}, at::device(at::kMeta));
  EXPECT_THROW(is_same_bits(elsewhere, elsewhere), AssertionFailure);
}

using Choice = CompiledTrial::Choice;

// Notes equal batches until the trial is over.
CompiledTrial tried(double executor_s, double compiled_s) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups + CompiledTrial::kTimed; ++batch) {
    EXPECT_EQ(trial.next(), Choice::kBoth);
    EXPECT_FALSE(trial.is_used());
    trial.note(true, executor_s, compiled_s);
  }
  return trial;
}

TEST(CompiledTrial, FasterCodeOfTheSameBitsIsUsed) {
  CompiledTrial trial = tried(2.0, 1.0);
  EXPECT_TRUE(trial.is_used());
  EXPECT_EQ(trial.next(), Choice::kCompiled);
}

TEST(CompiledTrial, CodeThatIsHardlyFasterIsNot) {
  CompiledTrial trial = tried(1.0, 0.97);
  EXPECT_TRUE(trial.is_refused());
  EXPECT_EQ(trial.next(), Choice::kExecutor);
}

TEST(CompiledTrial, TheFirstCallsAreNotTimed) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups; ++batch) trial.note(true, 0.0, 100.0);
  for (size_t batch = 0; batch < CompiledTrial::kTimed; ++batch) trial.note(true, 2.0, 1.0);
  EXPECT_TRUE(trial.is_used());
}

TEST(CompiledTrial, AFewSlowCallsDoNotDecide) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups + CompiledTrial::kTimed; ++batch)
    trial.note(true, 2.0, batch % 3 == 0 ? 50.0 : 1.0);
  EXPECT_TRUE(trial.is_used());
}

TEST(CompiledTrial, OneDifferenceIsFinalWheneverItComes) {
  for (size_t equal = 0; equal < CompiledTrial::kWarmups + CompiledTrial::kTimed + 3; ++equal) {
    CompiledTrial trial;
    for (size_t batch = 0; batch < equal; ++batch) trial.note(true, 2.0, 1.0);
    trial.note(false, 2.0, 1.0);
    EXPECT_TRUE(trial.is_refused());
    trial.note(true, 2.0, 1.0);
    EXPECT_EQ(trial.next(), Choice::kExecutor) << equal;
  }
}

TEST(CompiledTrial, WhatIsUsedIsComparedNowAndThen) {
  CompiledTrial trial = tried(2.0, 1.0);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t batch = 1; batch < CompiledTrial::kCompareEvery; ++batch) EXPECT_EQ(trial.next(), Choice::kCompiled);
    EXPECT_EQ(trial.next(), Choice::kBoth);
    trial.note(true, 2.0, 5.0);  // a slow one changes nothing any more
  }
  EXPECT_TRUE(trial.is_used());
}

}  // namespace
}  // namespace penstock::runtime
