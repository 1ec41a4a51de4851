// SPDX-License-Identifier: Apache-2.0
// The loops that fill the slab, against torch's own operators.
#include "worker/stack.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "batch_fixture.h"

namespace penstock::worker {
namespace {

class StackTest : public BatchTest {
 protected:
  StackTest() { open({.arena_bytes = 8 << 20, .prefetch_factor = 2}); }

  // Random bytes of one type and shape, each in a layout of its own.
  std::vector<at::Tensor> draw_samples() {
    const auto type = kPlainTypes[draw<size_t>(0, 19)];
    const auto sizes = draw_sizes();
    std::vector<at::Tensor> samples(draw<size_t>(1, 9));
    for (at::Tensor& sample : samples) {
      auto stored = sizes;
      const bool is_turned = sizes.size() >= 2 && toss();
      if (is_turned) std::swap(stored.front(), stored.back());
      sample = at::empty(stored, at::TensorOptions().dtype(type));
      fill(sample);
      if (is_turned) sample = sample.transpose(0, sample.dim() - 1);
    }
    return samples;
  }

  // In a worker torch stacks into contiguous memory that it made before.
  static at::Tensor stack_as_torch_does_in_a_worker(const std::vector<at::Tensor>& samples) {
    auto sizes = samples.front().sizes().vec();
    sizes.insert(sizes.begin(), static_cast<int64_t>(samples.size()));
    at::Tensor out = at::empty(sizes, samples.front().options());
    return at::stack_out(out, samples);
  }

  static std::vector<Number> numbers_of(const std::vector<double>& floats) {
    std::vector<Number> numbers;
    for (const double value : floats) numbers.push_back({.floating = value});
    return numbers;
  }

  static std::vector<Number> numbers_of(const std::vector<int64_t>& integers) {
    std::vector<Number> numbers;
    for (const int64_t value : integers) numbers.push_back({.integer = value});
    return numbers;
  }

  void expect_in_slab(const at::Tensor& batch) {
    const auto sealed = seal({batch});
    if (batch.numel() > 0) {
      EXPECT_EQ(sealed.region->data() + sealed_offset(sealed, 0), batch.const_data_ptr()) << "it was copied";
    }
    release(sealed);
  }
};

TEST_F(StackTest, StackedSamplesAreTorchsStackToTheBitAndLieInTheSlab) {
  for (int round = 0; round < 300; ++round) {
    writer_->begin();
    const auto samples = draw_samples();
    const auto batch = stack_samples(*writer_, samples);
    ASSERT_TRUE(batch.defined());
    const auto expected = stack_as_torch_does_in_a_worker(samples);
    ASSERT_TRUE(is_same(batch, expected));
    ASSERT_EQ(batch.strides(), expected.strides());
    expect_in_slab(batch);
  }
}

TEST_F(StackTest, SamplesThatTorchWouldRefuseOrPromoteAreLeftToTorch) {
  const std::vector<std::vector<at::Tensor>> others = {
      {},
      {at::ones({2}), at::ones({3})},
      {at::ones({2}), at::ones({2, 1})},
      {at::ones({2}), at::arange(2)},
      {at::ones({2}), at::ones({2}).requires_grad_()},
      {at::ones({2}).to_sparse(), at::ones({2}).to_sparse()},
  };
  for (const auto& samples : others) EXPECT_FALSE(stack_samples(*writer_, samples).defined());
}

TEST_F(StackTest, GatheredRowsAreTorchsIndexSelectToTheBitAndLieInTheSlab) {
  for (int round = 0; round < 300; ++round) {
    writer_->begin();
    at::Tensor source = draw_tensor();
    if (source.dim() == 0 || source.size(0) == 0) continue;
    std::vector<int64_t> indices(draw<size_t>(1, 20));
    for (int64_t& index : indices) index = draw<int64_t>(0, source.size(0) - 1);
    const auto batch = gather_rows(*writer_, source, indices);
    ASSERT_TRUE(batch.defined());
    // Elements of the same width stand for types that index_select does not know.
    std::vector<at::Tensor> rows;
    for (const int64_t index : indices) rows.push_back(source.select(0, index));
    ASSERT_TRUE(is_same(batch, stack_as_torch_does_in_a_worker(rows)));
    if (source.scalar_type() == at::kFloat || source.scalar_type() == at::kLong) {
      ASSERT_TRUE(is_same(batch, at::index_select(source, 0, at::tensor(indices))));
    }
    ASSERT_TRUE(batch.is_contiguous());
    expect_in_slab(batch);
  }
}

// Such batches are copied past the caches.
TEST_F(StackTest, LargeBatchesOfLongRowsAreTorchsToTheBit) {
  constexpr int64_t kRowCount = 500;
  writer_.reset();
  open({.arena_bytes = 64 << 20, .prefetch_factor = 2});
  at::Tensor source = at::empty({kRowCount, 5001}, at::kFloat);  // 20,004 bytes: rows at every alignment of four
  fill(source);
  std::vector<int64_t> indices(kRowCount);
  for (int64_t& index : indices) index = draw<int64_t>(0, kRowCount - 1);
  const auto expected = at::index_select(source, 0, at::tensor(indices));
  writer_->begin();
  const auto gathered = gather_rows(*writer_, source, indices);
  ASSERT_TRUE(is_same(gathered, expected));
  expect_in_slab(gathered);
  std::vector<at::Tensor> samples;
  for (const int64_t index : indices) samples.push_back(source.select(0, index));
  writer_->begin();
  const auto stacked = stack_samples(*writer_, samples);
  ASSERT_TRUE(is_same(stacked, expected));
  expect_in_slab(stacked);
}

TEST_F(StackTest, RowsThatAreNotThereAreLeftToTorch) {
  const auto source = at::arange(10);
  for (const int64_t index : {int64_t{-1}, int64_t{10}, std::numeric_limits<int64_t>::max()}) {
    const std::vector<int64_t> indices = {0, index};
    EXPECT_FALSE(gather_rows(*writer_, source, indices).defined()) << index;
  }
  EXPECT_FALSE(gather_rows(*writer_, source, {}).defined());
  const std::vector<int64_t> first = {0};
  EXPECT_FALSE(gather_rows(*writer_, at::ones({}), first).defined());
}

TEST_F(StackTest, NumbersAreTorchsTensorsOfThem) {
  const std::vector<double> floats = {0.5, -0.0, std::nan(""), std::numeric_limits<double>::infinity(), 5e-324};
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    EXPECT_TRUE(is_same(stack_numbers(*writer_, numbers_of(floats), dtype), at::tensor(floats, dtype)));
  }
  const std::vector<int64_t> integers = {0, -1, 127};
  for (const auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar}) {
    EXPECT_TRUE(is_same(stack_numbers(*writer_, numbers_of(integers), dtype), at::tensor(integers, dtype)));
  }
  const std::vector<int64_t> edges = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  EXPECT_TRUE(is_same(stack_numbers(*writer_, numbers_of(edges), at::kLong), at::tensor(edges)));
  const std::vector<int64_t> bytes = {0, 255};
  EXPECT_TRUE(is_same(stack_numbers(*writer_, numbers_of(bytes), at::kByte), at::tensor(bytes, at::kByte)));
  const std::vector<int64_t> truths = {1, 0, 1};
  EXPECT_TRUE(is_same(stack_numbers(*writer_, numbers_of(truths), at::kBool), at::tensor(truths).to(at::kBool)));
}

TEST_F(StackTest, StackedRowsAreTorchsStackOfThemAndLieInTheSlab) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {3}, {2, 5}, {0, 4}}) {
    writer_->begin();
    std::vector<at::Tensor> samples(5);
    std::vector<const void*> rows;
    for (at::Tensor& sample : samples) {
      sample = at::empty(sizes, at::kFloat);
      fill(sample);
      rows.push_back(sample.const_data_ptr());
    }
    const auto batch = stack_rows(*writer_, rows, sizes, at::kFloat);
    EXPECT_TRUE(is_same(batch, at::stack(samples)));
    expect_in_slab(batch);
  }
}

TEST_F(StackTest, WhatDoesNotFitTheSlabComesFromTheHeapWithTheSameContent) {
  const std::vector<at::Tensor> small = {at::ones({10})};
  const std::vector<at::Tensor> large(4, at::arange(1 << 18));
  const auto first = stack_samples(*writer_, small);
  const auto second = stack_samples(*writer_, large);
  EXPECT_TRUE(is_same(second, at::stack(large)));
  const auto tensors = read(seal({first, second}));
  EXPECT_TRUE(is_same(tensors[0], at::stack(small)));
  EXPECT_TRUE(is_same(tensors[1], at::stack(large)));
}

TEST_F(StackTest, WithoutSharedMemoryEverythingComesFromTheHeap) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              test::limit_file_size(4096);
              const std::vector<at::Tensor> samples = {at::arange(5), at::arange(5)};
              const std::vector<int64_t> indices = {3, 1};
              if (!is_same(stack_samples(*writer_, samples), at::stack(samples))) return "stack_samples";
              if (!is_same(gather_rows(*writer_, at::arange(5), indices), at::tensor(indices))) return "gather_rows";
              const auto column = stack_numbers(*writer_, numbers_of(indices), at::kLong);
              if (!is_same(column, at::tensor(indices))) return "stack_numbers";
              return "";
            }),
            "");
}

// Samples that are copied into the rows of their batch one by one, against torch's stack.

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
