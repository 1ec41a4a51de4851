// SPDX-License-Identifier: Apache-2.0
// Samples that are copied into the rows of their batch one by one, against torch's stack.
#include "worker/sample_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "batch_fixture.h"
#include "worker/stack.h"

namespace penstock::worker {
namespace {

constexpr int64_t kNumbers = 4 << 10;  // float32: 16 KiB, the least that is moved

class SampleRowsTest : public BatchTest {
 protected:
  SampleRowsTest() {
    open({.arena_bytes = 8 << 20, .prefetch_factor = 2});
    rows_.emplace(*writer_);
  }

  // A tensor that nobody else holds, as a dataset would have made it.
  at::Tensor draw_sample(std::vector<int64_t> sizes = {kNumbers}, at::ScalarType type = at::kFloat) {
    at::Tensor sample = at::empty(sizes, at::TensorOptions().dtype(type));
    fill(sample);
    return sample;
  }

  // Begins a batch of samples of one tensor each, and moves those that can be.
  std::vector<at::Tensor> move_all(std::vector<at::Tensor> samples) {
    writer_->begin();
    rows_->begin(samples.size());
    for (at::Tensor& sample : samples) {
      rows_->begin_sample();
      if (at::Tensor row = rows_->take(sample); row.defined()) sample = std::move(row);
    }
    return samples;
  }

  static std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& samples) {
    std::vector<at::Tensor> copies;
    for (const auto& sample : samples) copies.push_back(sample.clone());
    return copies;
  }

  std::optional<SampleRows> rows_;
};

TEST_F(SampleRowsTest, MovedSamplesAreTheirBatchWithoutACopy) {
  for (const auto type : kPlainTypes) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(type));
    std::vector<at::Tensor> samples;
    for (int64_t place = 0; place < 5; ++place) samples.push_back(draw_sample({2, (8 << 10) / bytes, 3}, type));
    const auto expected = at::stack(copies_of(samples));
    const auto rows = move_all(std::move(samples));
    const void* const first_row = rows.front().const_data_ptr();
    const auto batch = stack_samples(*writer_, rows);
    EXPECT_TRUE(rows_->end());
    ASSERT_TRUE(is_same(batch, expected));
    EXPECT_EQ(batch.strides(), expected.strides());
    EXPECT_EQ(batch.const_data_ptr(), first_row);
    const auto sealed = seal({batch});
    EXPECT_EQ(sealed.region->data() + sealed_offset(sealed, 0), first_row);
    release(sealed);
  }
}

TEST_F(SampleRowsTest, ATurnedSampleIsStackedAsTorchStacksIt) {
  std::vector<at::Tensor> samples;
  std::vector<at::Tensor> copies;
  for (int place = 0; place < 3; ++place) {
    at::Tensor sample = at::empty({64, 3, 64}, at::TensorOptions().dtype(at::kFloat)).permute({1, 0, 2});
    sample.copy_(draw_sample({3, 64, 64}));
    copies.push_back(sample.clone());
    samples.push_back(std::move(sample));
  }
  // permute() gives a view, whose base nobody else holds.
  const auto rows = move_all(std::move(samples));
  ASSERT_TRUE(is_same(stack_samples(*writer_, rows), at::stack(copies)));
}

TEST_F(SampleRowsTest, WhatAnybodyElseHoldsStaysWhereItIs) {
  std::vector<float> numbers(kNumbers);
  const auto held = draw_sample();
  const auto view_of_held = held.view({2, kNumbers / 2});
  const std::vector<at::Tensor> samples = {held, view_of_held, at::from_blob(numbers.data(), {kNumbers}, [](void*) {}),
                                           draw_sample({kNumbers - 1}), draw_sample().requires_grad_()};
  for (const auto& sample : samples) {
    rows_->begin(2);
    rows_->begin_sample();
    EXPECT_FALSE(rows_->take(sample).defined());
    EXPECT_FALSE(rows_->end());
  }
}

TEST_F(SampleRowsTest, SamplesThatDifferAreLeftToTorch) {
  std::vector<at::Tensor> samples;
  samples.push_back(draw_sample());
  samples.push_back(draw_sample({kNumbers + 1}));
  samples.push_back(draw_sample());
  const auto copies = copies_of(samples);
  const auto rows = move_all(std::move(samples));
  EXPECT_FALSE(stack_samples(*writer_, rows).defined());
  for (size_t place = 0; place < copies.size(); ++place) EXPECT_TRUE(is_same(rows[place], copies[place]));
}

TEST_F(SampleRowsTest, ASampleThatSomebodyHoldsAmongOthersMakesNoDifference) {
  const auto held = draw_sample();
  std::vector<at::Tensor> samples;
  samples.push_back(draw_sample());
  samples.push_back(held);
  samples.push_back(draw_sample());
  const auto expected = at::stack(copies_of(samples));
  const auto rows = move_all(std::move(samples));
  EXPECT_TRUE(is_same(stack_samples(*writer_, rows), expected));
  EXPECT_EQ(held.use_count(), 2u) << "the sample and the test have it";
}

TEST_F(SampleRowsTest, RowsOfAnotherOrderAreCopied) {
  auto rows = move_all([&] {
    std::vector<at::Tensor> samples;
    for (int place = 0; place < 3; ++place) samples.push_back(draw_sample());
    return samples;
  }());
  std::swap(rows[0], rows[2]);
  const auto expected = at::stack(copies_of(rows));
  EXPECT_TRUE(is_same(stack_samples(*writer_, rows), expected));
  const std::vector<at::Tensor> fewer(rows.begin(), rows.begin() + 2);
  EXPECT_TRUE(is_same(stack_samples(*writer_, fewer), at::stack(copies_of(fewer))));
}

TEST_F(SampleRowsTest, ABatchOfRowsThatIsStillHeldIsCopied) {
  auto rows = move_all([&] {
    std::vector<at::Tensor> samples;
    for (int place = 0; place < 3; ++place) samples.push_back(draw_sample());
    return samples;
  }());
  const at::Tensor view = rows[1].slice(0, 0, 7);
  const auto batch = stack_samples(*writer_, rows);
  EXPECT_NE(batch.const_data_ptr(), rows[0].const_data_ptr());
  EXPECT_TRUE(is_same(batch, at::stack(copies_of(rows))));
  EXPECT_TRUE(is_same(view, batch[1].slice(0, 0, 7)));
}

TEST_F(SampleRowsTest, ColumnsThatNoSampleHasInTheSamePlaceAreNotMixedUp) {
  writer_->begin();
  rows_->begin(2);
  std::vector<std::vector<at::Tensor>> columns(2);
  std::vector<std::vector<at::Tensor>> copies(2);
  for (const auto& order : {std::pair(0, 1), std::pair(1, 0)}) {
    rows_->begin_sample();
    for (const int column : {order.first, order.second}) {
      at::Tensor sample = draw_sample();
      copies[column].push_back(sample.clone());
      at::Tensor row = rows_->take(sample);
      columns[column].push_back(row.defined() ? row : sample);
    }
  }
  for (int column = 0; column < 2; ++column) {
    EXPECT_TRUE(is_same(stack_samples(*writer_, columns[column]), at::stack(copies[column])));
  }
}

TEST_F(SampleRowsTest, NothingIsMovedWhereNoSlabIsFree) {
  std::vector<SealedBatch> held;
  for (int count = 0; count < 4; ++count) held.push_back(seal({draw_sample()}));
  const auto rows = move_all([&] {
    std::vector<at::Tensor> samples;
    samples.push_back(draw_sample());
    return samples;
  }());
  EXPECT_FALSE(writer_->holds(rows[0].storage()));
  EXPECT_TRUE(rows_->end()) << "it depends on the slabs, not on the samples";
  release(held.front());
  EXPECT_TRUE(is_same(stack_samples(*writer_, rows), rows[0].unsqueeze(0)));
}

TEST_F(SampleRowsTest, TheSlabOfABatchThatWasGivenUpIsFreeAgain) {
  for (int round = 0; round < 20; ++round) {
    auto rows = move_all([&] {
      std::vector<at::Tensor> samples;
      for (int place = 0; place < 2; ++place) samples.push_back(draw_sample());
      return samples;
    }());
    EXPECT_TRUE(rows_->end()) << "round " << round;
  }
}

}  // namespace
}  // namespace penstock::worker
