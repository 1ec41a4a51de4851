// SPDX-License-Identifier: Apache-2.0
#include "worker/slab_writer.h"

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/zeros.h>

#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "../base/child_process.h"
#include "batch_fixture.h"
#include "megabyte.h"

namespace penstock::worker {
namespace {

class SlabWriterTest : public BatchTest {
 protected:
  SlabWriterTest() { open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2}); }

  at::Tensor in_slab(std::vector<int64_t> sizes, at::ScalarType type = at::kFloat) {
    at::Tensor tensor = writer_->empty(sizes, type);
    EXPECT_TRUE(tensor.defined());
    fill(tensor);
    return tensor;
  }
  at::Tensor of_bytes(uint64_t bytes) {
    return at::full({static_cast<int64_t>(bytes)}, draw(0, 255), at::TensorOptions().dtype(at::kByte));
  }
  void expect_same(const SealedBatch& batch, const std::vector<at::Tensor>& expected) {
    const auto tensors = read(batch);
    ASSERT_EQ(tensors.size(), expected.size());
    for (size_t index = 0; index < expected.size(); ++index) {
      EXPECT_TRUE(is_same(tensors[index], expected[index]));
      EXPECT_EQ(tensors[index].strides(), expected[index].strides());
    }
  }
};

TEST_F(SlabWriterTest, TensorsMadeInTheSlabAreWhereTheTrainerReadsThem) {
  const auto first = in_slab({2, 3});
  const auto second = in_slab({5}, at::kLong);
  const auto batch = seal({second, first});
  EXPECT_EQ(batch.region->data() + sealed_offset(batch, 0), second.const_data_ptr());
  EXPECT_EQ(batch.region->data() + sealed_offset(batch, 1), first.const_data_ptr());
  expect_same(batch, {second, first});
}

TEST_F(SlabWriterTest, TensorsMadeElsewhereAreCopiedIn) {
  const auto tensor = at::arange(100);
  const auto batch = seal({tensor});
  expect_same(batch, {tensor});
  EXPECT_NE(batch.region->data() + sealed_offset(batch, 0), tensor.const_data_ptr());
}

TEST_F(SlabWriterTest, AViewOfATensorInTheSlabStaysThereWhereItsBytesAreAligned) {
  const auto whole = in_slab({4, 16});
  const auto batch = seal({whole.t(), whole.select(0, 2), whole.slice(1, 1)});
  EXPECT_EQ(sealed_offset(batch, 0), 0u);
  EXPECT_EQ(sealed_offset(batch, 1), 2u * 64);
  expect_same(batch, {whole.t(), whole.select(0, 2), whole.slice(1, 1)});
}

// A pool's trainer took such a batch for one that its worker had made wrong.
TEST_F(SlabWriterTest, SharesBeyondTheBoundOfAPoolAreCopied) {
  for (const size_t count : {size_t{64}, size_t{65}}) {
    for (const bool is_of_pool : {false, true}) {
      if (is_of_pool) writer_->bound_sharing();
      writer_->begin();
      const auto whole = in_slab({1 << 12});
      const std::vector<at::Tensor> views(count, whole);
      const auto batch = seal(views);
      const bool is_copied = is_of_pool && count > wire::kWholeFactorMax;
      EXPECT_EQ(sealed_offset(batch, 1), is_copied ? whole.nbytes() : 0u);
      expect_same(batch, views);
      release(batch);
    }
    writer_.emplace(*pool_);
  }
}

TEST_F(SlabWriterTest, TensorsOfEveryTypeAndLayoutComeBack) {
  for (int round = 0; round < 200; ++round) {
    writer_->begin();
    std::vector<at::Tensor> tensors(draw<size_t>(0, 12));
    for (at::Tensor& tensor : tensors) {
      tensor = toss() ? draw_tensor() : in_slab(draw_sizes(), kPlainTypes[draw<size_t>(0, 19)]);
    }
    const auto batch = seal(tensors);
    expect_same(batch, tensors);
    release(batch);
  }
}

TEST_F(SlabWriterTest, BoundaryTensorsAreTheLastOfTheTable) {
  const auto batch = seal({at::ones({2}), at::zeros({3})}, {kKey});
  const auto frame = frame_of(batch);
  EXPECT_EQ(frame.leaf_count(), 1u);
  EXPECT_EQ(frame.boundary_keys.at(0), kKey);
  expect_same(batch, {at::ones({2}), at::zeros({3})});
}

TEST_F(SlabWriterTest, ABatchWithoutTensorsIsARecordAlone) {
  const auto batch = seal({});
  EXPECT_EQ(batch.record_offset, 0u);
  EXPECT_TRUE(frame_of(batch).tensors.empty());
}

TEST_F(SlabWriterTest, ABatchLargerThanItsSlabMovesToALargerOneAndTheFirstIsFreeAgain) {
  const auto inside = in_slab({1 << 10});
  const auto first = inside.const_data_ptr();
  const auto outside = of_bytes(3 * kMegabyte);
  const auto batch = seal({inside, outside});
  EXPECT_FALSE(batch.region->is_transient);
  EXPECT_GE(batch.region->capacity(), 3 * kMegabyte);
  EXPECT_NE(batch.region->data(), first);
  expect_same(batch, {inside, outside});
}

TEST_F(SlabWriterTest, ABatchLargerThanHalfTheCapHasAnArenaOfItsOwnAndTheLastingOneServesOn) {
  const auto small = seal({at::ones({4})});
  const auto large = of_bytes(9 * kMegabyte);
  const auto batch = seal({large});
  EXPECT_TRUE(batch.region->is_transient);
  expect_same(batch, {large});
  EXPECT_EQ(seal({at::ones({4})}).region->arena, small.region->arena);
}

TEST_F(SlabWriterTest, ATensorLargerThanASlabIsMadeInOneThatIsLargeEnough) {
  for (const uint64_t bytes : {3 * kMegabyte, 9 * kMegabyte}) {
    writer_->begin();
    const auto tensor = writer_->new_bytes(static_cast<int64_t>(bytes));
    ASSERT_TRUE(tensor.defined());
    EXPECT_EQ(seal({tensor}).region->data(), tensor.const_data_ptr()) << "it was copied";
  }
}

TEST_F(SlabWriterTest, BatchesOfWildlyDifferentSizesComeBack) {
  std::deque<std::pair<SealedBatch, at::Tensor>> with_trainer;
  for (int round = 0; round < 150; ++round) {
    writer_->begin();
    const auto bytes = uint64_t{1} << draw(0, 23);
    at::Tensor tensor = toss() ? writer_->new_bytes(static_cast<int64_t>(bytes)) : at::Tensor();
    if (!tensor.defined()) tensor = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
    tensor.fill_(draw(0, 255));
    with_trainer.emplace_back(seal({tensor}), tensor.clone());
    tensor.reset();
    if (with_trainer.size() < 2) continue;
    expect_same(with_trainer.front().first, {with_trainer.front().second});
    release(with_trainer.front().first);
    with_trainer.pop_front();
  }
}

TEST_F(SlabWriterTest, ATensorThatTheDatasetKeepsHoldsItsSlabBackAndItsContentSurvives) {
  const auto kept = in_slab({1000});
  const auto content = kept.clone();
  release(seal({kept}));
  for (int round = 0; round < 20; ++round) {
    writer_->begin();
    auto tensor = in_slab({1000});
    const auto batch = seal({tensor});
    tensor.reset();
    release(batch);
  }
  EXPECT_TRUE(is_same(kept, content));
}

TEST_F(SlabWriterTest, ADatasetThatKeepsEveryBatchIsNeverStuck) {
  // A dataset that caches results of its collate_fn made the worker wait for ever for slabs that it held itself.
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  for (int round = 0; round < 40; ++round) {
    writer_->begin();
    const auto tensor = in_slab({1000});
    kept.emplace_back(tensor, tensor.clone());
    release(seal({tensor}));
  }
  for (const auto& [tensor, content] : kept) EXPECT_TRUE(is_same(tensor, content));
}

TEST_F(SlabWriterTest, AnAbandonedBatchGivesItsSlabBackOnceItsTensorsAreGone) {
  const auto* place = in_slab({10}).const_data_ptr();
  writer_->begin();
  auto abandoned = in_slab({10});
  EXPECT_EQ(abandoned.const_data_ptr(), place);
  writer_->begin();
  EXPECT_NE(in_slab({10}).const_data_ptr(), place) << "a tensor still lies there";
}

TEST_F(SlabWriterTest, TensorsInTheSlabHaveStoragesOfTheirBytesThatCannotGrow) {
  const auto tensor = in_slab({3, 5}, at::kShort);
  EXPECT_EQ(tensor.storage().nbytes(), 30u);
  EXPECT_FALSE(tensor.storage().resizable());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % wire::kPayloadAlignment, 0u);
}

TEST_F(SlabWriterTest, ThreadsThatMakeTensorsAtOnceGetPlacesApart) {
  constexpr int kThreadCount = 4;
  constexpr int kTensorCount = 50;
  std::vector<std::vector<at::Tensor>> made(kThreadCount);
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreadCount; ++thread) {
      threads.emplace_back([&, thread] {
        for (int index = 0; index < kTensorCount; ++index) {
          const auto tensor = writer_->empty({100 + index}, at::kByte);
          std::memset(tensor.mutable_data_ptr(), thread * kTensorCount + index, static_cast<size_t>(tensor.numel()));
          made[static_cast<size_t>(thread)].push_back(tensor);
        }
      });
    }
  }
  std::vector<at::Tensor> all;
  std::vector<at::Tensor> expected;
  for (int thread = 0; thread < kThreadCount; ++thread) {
    for (int index = 0; index < kTensorCount; ++index) {
      all.push_back(made[static_cast<size_t>(thread)][static_cast<size_t>(index)]);
      expected.push_back(at::full({100 + index}, thread * kTensorCount + index, at::TensorOptions().dtype(at::kByte)));
    }
  }
  expect_same(seal(all), expected);
}

TEST_F(SlabWriterTest, WhenTheFileSizeLimitLeavesNoArenaTheBatchGoesInline) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              test::limit_file_size(4096);
              if (writer_->empty({10}, at::kFloat).defined()) return "a tensor in memory that is not there";
              const auto tensor = at::arange(1000);
              const auto batch = seal({tensor, at::ones({3})}, {kKey});
              if (batch.region) return "a region without memory";
              const auto tensors = read(batch);
              return is_same(tensors[0], tensor) && is_same(tensors[1], at::ones({3})) ? "" : "the content differs";
            }),
            "");
}

TEST_F(SlabWriterTest, WhenMemoryRunsOutWithinABatchItGoesInlineWithWhatLiesInTheSlab) {
  auto inside = in_slab({100});
  EXPECT_EQ(test::in_child([&]() -> std::string {
              if (!test::fail_fallocate(ENOSPC)) return "no seccomp filter";
              if (writer_->empty({1 << 16}, at::kFloat).defined()) return "a tensor in memory that is not there";
              const auto outside = at::arange(1 << 16);
              const auto batch = seal({inside, outside});
              if (batch.region) return "a region without memory";
              const auto tensors = read(batch);
              if (!is_same(tensors[0], inside) || !is_same(tensors[1], outside)) return "the content differs";
              inside.reset();
              writer_->begin();
              return seal({at::ones({2})}).region ? "" : "the slab that has memory is not used again";
            }),
            "");
}

TEST_F(SlabWriterTest, SealingWithoutATrainerIsClosed) {
  for (int slab = 0; slab < 4; ++slab) seal({at::ones({1})});
  is_closing_.store(true);
  const auto sealed = writer_->seal({.tensors = {}, .boundary_keys = {}, .nest = {}});
  EXPECT_EQ(sealed.error().code, Errc::kClosed);
}

TEST_F(SlabWriterTest, OnlyWhatTheTableCanSayIsPlain) {
  for (const auto type : kPlainTypes) EXPECT_TRUE(is_plain_tensor(at::empty({2}, at::TensorOptions().dtype(type))));
  EXPECT_TRUE(is_plain_tensor(at::ones({2, 3}).t()));
  EXPECT_TRUE(is_plain_tensor(at::empty(std::vector<int64_t>(64, 1))));
  EXPECT_FALSE(is_plain_tensor(at::Tensor()));
  EXPECT_FALSE(is_plain_tensor(at::ones({2}).requires_grad_()));
  EXPECT_FALSE(is_plain_tensor(at::ones({2, 2}).to_sparse()));
  EXPECT_FALSE(is_plain_tensor(at::ones({2, 2}).to_sparse_csr()));
  EXPECT_FALSE(is_plain_tensor(at::empty({2}, at::TensorOptions().device(at::kMeta))));
  EXPECT_FALSE(is_plain_tensor(at::ones({2}, at::TensorOptions().dtype(at::kComplexFloat)).conj()));
  EXPECT_FALSE(is_plain_tensor(at::ones({2}, at::TensorOptions().dtype(at::kComplexFloat))._neg_view()));
  EXPECT_FALSE(is_plain_tensor(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)));
  EXPECT_FALSE(is_plain_tensor(at::_efficientzerotensor({2}))) << "it has no memory to read";
  EXPECT_FALSE(is_plain_tensor(at::empty(std::vector<int64_t>(65, 1))));
}

}  // namespace
}  // namespace penstock::worker
