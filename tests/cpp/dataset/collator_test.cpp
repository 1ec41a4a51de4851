// SPDX-License-Identifier: Apache-2.0
#include "dataset/collator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "heap_memory.h"

namespace penstock::dataset {
namespace {

TEST(CopyPastCaches, CopiesEveryByteAndNoOtherAtEveryAlignmentAndLength) {
  constexpr std::byte kUntouched{0xA5};
  constexpr size_t kRoom = 64 + 300 + 64;
  std::mt19937 random(7);
  std::vector<std::byte> source(kRoom);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random() % 256);
  for (size_t to = 0; to < 64; ++to) {
    for (const size_t from : {0, 1, 15, 16, 33}) {
      for (size_t bytes = 0; bytes <= 300; bytes += bytes < 70 ? 1 : 23) {
        std::vector<std::byte> target(kRoom, kUntouched);
        copy_bypassing_caches(target.data() + to, source.data() + from, bytes);
        for (size_t at = 0; at < kRoom; ++at) {
          const bool is_copied = at >= to && at < to + bytes;
          ASSERT_EQ(target[at], is_copied ? source[from + at - to] : kUntouched)
              << "byte " << at << " of " << bytes << " from " << from << " to " << to;
        }
      }
    }
  }
}

class CollatorTest : public ::testing::Test {
 protected:
  Value collate(const std::vector<Value>& samples, size_t capacity = 0) {
    Collator collator(memory, capacity == 0 ? samples.size() : capacity);
    for (const Value& sample : samples) collator.add(sample);
    return collator.finish();
  }

  std::string refusal(const std::vector<Value>& samples) {
    try {
      collate(samples);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kValue);
      return error.what();
    }
    return "";
  }

  HeapMemory memory;
};

TEST_F(CollatorTest, TensorsAreStacked) {
  const std::vector<at::Tensor> rows = {at::full({2, 3}, 1.5), at::full({2, 3}, -2.0),
                                        at::arange(6.0).view({3, 2}).t()};
  const Value batch = collate({rows[0], rows[1], rows[2]});
  EXPECT_TRUE(at::equal(batch.tensor(), at::stack(rows)));
  EXPECT_TRUE(batch.tensor().is_contiguous());
}

TEST_F(CollatorTest, NumbersBecomeTheTensorsThatTorchMakesOfThem) {
  const Value batch = collate({Value::tuple({1, 2.5, true}), Value::tuple({-7, 3, false})});
  EXPECT_TRUE(at::equal(batch[0].tensor(), at::tensor({int64_t{1}, int64_t{-7}})));
  EXPECT_TRUE(at::equal(batch[1].tensor(), at::tensor({2.5, 3.0}, at::kDouble)));
  EXPECT_EQ(batch[2].tensor().scalar_type(), at::kBool);
}

TEST_F(CollatorTest, PartsOfDictsListsAndTuplesAreCollatedAndTuplesBecomeLists) {
  const auto sample = [](int64_t number) {
    return Value::dict({{"pair", Value::tuple({number, at::full({1}, number)})}, {"name", std::to_string(number)}});
  };
  const Value batch = collate({sample(4), sample(5)});
  EXPECT_EQ(batch["pair"].kind(), Value::Kind::kList);
  EXPECT_TRUE(at::equal(batch["pair"][0].tensor(), at::tensor({int64_t{4}, int64_t{5}})));
  EXPECT_EQ(batch["name"].kind(), Value::Kind::kList);
  EXPECT_EQ(batch["name"][1].text(), "5");
}

TEST_F(CollatorTest, EntriesMayComeInAnotherOrder) {
  const Value batch = collate({Value::dict({{"a", 1}, {"b", 2}}), Value::dict({{"b", 4}, {"a", 3}})});
  EXPECT_TRUE(at::equal(batch["a"].tensor(), at::tensor({int64_t{1}, int64_t{3}})));
}

TEST_F(CollatorTest, AShortBatchHasAStorageOfItsOwnSize) {
  const Value batch = collate({at::zeros({4}), at::zeros({4})}, /*capacity=*/8);
  EXPECT_EQ(batch.tensor().sizes(), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(batch.tensor().storage().nbytes(), 2 * 4 * sizeof(float));
}

TEST_F(CollatorTest, EmptyTensorsMakeAnEmptyBatch) {
  EXPECT_EQ(collate({at::zeros({0, 3}), at::zeros({0, 3})}).tensor().sizes(), (std::vector<int64_t>{2, 0, 3}));
}

TEST_F(CollatorTest, SamplesThatDifferAreRefusedByTheirPlace) {
  EXPECT_EQ(refusal({Value::dict({{"x", at::zeros({3, 4})}}), Value::dict({{"x", at::zeros({3, 5})}})}),
            "stack expects each tensor to be equal size, but got [3, 4] at entry 0 and [3, 5] at entry 1; it is part "
            "['x'] of the samples");
  EXPECT_NE(refusal({at::zeros({1}), at::zeros({1}, at::kLong)}).find("one dtype, but got Float at entry 0 and Long"),
            std::string::npos);
  EXPECT_NE(refusal({Value::list({1, 2}), Value::list({1})}).find("should be of equal size"), std::string::npos);
  EXPECT_NE(refusal({Value::dict({{"x", 1}}), Value::dict({{"y", 1}})}).find("sample 1 has no entry 'x'"),
            std::string::npos);
  EXPECT_NE(refusal({1, "one"}).find("sample 1 has 'one'"), std::string::npos);
  EXPECT_NE(refusal({Value()}).find("found none"), std::string::npos);
  EXPECT_NE(refusal({at::Tensor()}).find("undefined tensor"), std::string::npos);
}

}  // namespace
}  // namespace penstock::dataset
