// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's pool and writer, and the trainer's part played in the same process: reading a batch from its bytes, and
// giving slabs back.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../base/seeded_test.h"
#include "shm/arena.h"
#include "shm/slab_pool.h"
#include "wire/frame.h"
#include "wire/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// The types that travel in the tensor table.
inline constexpr at::ScalarType kPlainTypes[] = {at::kByte,
                                                 at::kChar,
                                                 at::kShort,
                                                 at::kInt,
                                                 at::kLong,
                                                 at::kHalf,
                                                 at::kFloat,
                                                 at::kDouble,
                                                 at::kComplexHalf,
                                                 at::kComplexFloat,
                                                 at::kComplexDouble,
                                                 at::kBool,
                                                 at::kBFloat16,
                                                 at::kFloat8_e5m2,
                                                 at::kFloat8_e4m3fn,
                                                 at::kFloat8_e5m2fnuz,
                                                 at::kFloat8_e4m3fnuz,
                                                 at::kUInt16,
                                                 at::kUInt32,
                                                 at::kUInt64};

// Of a boundary tensor, as `key` in a prefix's text.
inline const std::string kKey = "0123456789abcdef0123456789abcdef";

// Whether both are the same to the bit: type, shape and every element.
inline testing::AssertionResult is_same(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != right.scalar_type()) return testing::AssertionFailure() << "types differ";
  if (left.sizes() != right.sizes()) return testing::AssertionFailure() << "shapes " << left.sizes() << right.sizes();
  const auto first = left.contiguous();
  const auto second = right.contiguous();
  const size_t bytes = static_cast<size_t>(first.numel()) * first.element_size();
  if (bytes == 0 || std::memcmp(first.const_data_ptr(), second.const_data_ptr(), bytes) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "elements differ";
}

class BatchTest : public test::SeededTest {
 protected:
  // One thread, as in a worker: torch's pool of threads does not survive the forks of these tests.
  BatchTest() { at::set_num_threads(1); }

  void open(const shm::SlabPoolOptions& options) {
    pool_.emplace(options, is_closing_);
    writer_.emplace(*pool_);
  }

  SealedBatch seal(std::vector<at::Tensor> tensors, std::vector<std::string> boundary_keys = {}) {
    wire::NestWriter nest;
    nest.none();
    auto sealed =
        writer_->seal({.tensors = std::move(tensors), .boundary_keys = std::move(boundary_keys), .nest = nest.view()});
    EXPECT_TRUE(sealed) << sealed.error().message;
    return std::move(sealed).value();
  }

  static std::span<const std::byte> record_of(const SealedBatch& batch) {
    if (!batch.region) return batch.record;
    return {batch.region->data() + batch.record_offset, batch.record_bytes};
  }
  static wire::Frame frame_of(const SealedBatch& batch) {
    auto frame = wire::parse_frame(record_of(batch));
    EXPECT_TRUE(frame) << frame.error().message;
    return std::move(frame).value();
  }

  // The tensors of a batch as the trainer would read them, copied.
  static std::vector<at::Tensor> read(const SealedBatch& batch) {
    const auto frame = frame_of(batch);
    const std::byte* payload = batch.region ? batch.region->data() : batch.payload.data();
    EXPECT_LE(frame.payload_bytes, batch.region ? batch.record_offset : batch.payload.size());
    std::vector<at::Tensor> tensors;
    for (const auto& entry : frame.tensors) {
      const auto type = static_cast<at::ScalarType>(entry.dtype);
      at::Tensor tensor = at::empty_strided(entry.shape, entry.strides, at::TensorOptions().dtype(type));
      if (entry.bytes > 0) std::memcpy(tensor.mutable_data_ptr(), payload + entry.offset, entry.bytes);
      tensors.push_back(std::move(tensor));
    }
    return tensors;
  }

  // Gives the slab back as the trainer does.
  void release(const SealedBatch& batch) {
    const auto& arena = batch.region->arena;
    view_of(arena)->release(batch.region->slab_index, arena->generation(batch.region->slab_index));
  }
  std::shared_ptr<shm::ArenaView> view_of(const std::shared_ptr<shm::Arena>& arena) {
    auto& view = views_[arena->id()];
    if (!view) view = shm::ArenaView::map(FileDescriptor(::dup(arena->fd()))).value();
    return view;
  }

  static size_t sealed_offset(const SealedBatch& batch, size_t index) { return frame_of(batch).tensors[index].offset; }

  // A tensor of random bytes and a random layout: contiguous, transposed, expanded, sliced, empty or of no dimension.
  at::Tensor draw_tensor() {
    at::Tensor tensor = at::empty(draw_sizes(), at::TensorOptions().dtype(kPlainTypes[draw<size_t>(0, 19)]));
    fill(tensor);
    if (tensor.dim() >= 2 && toss()) tensor = tensor.transpose(0, tensor.dim() - 1);
    if (tensor.dim() >= 1 && tensor.size(0) > 1 && toss()) tensor = tensor.slice(0, 1, tensor.size(0), 2);
    if (draw(0, 4) == 0) {
      auto sizes = tensor.sizes().vec();
      sizes.insert(sizes.begin(), draw<int64_t>(1, 3));
      tensor = tensor.unsqueeze(0).expand(sizes);
    }
    return tensor;
  }
  std::vector<int64_t> draw_sizes() {
    std::vector<int64_t> sizes(draw<size_t>(0, 4));
    for (int64_t& size : sizes) size = draw(0, 9) == 0 ? 0 : draw<int64_t>(1, 7);
    return sizes;
  }
  void fill(const at::Tensor& tensor) {
    auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
    const size_t count = tensor.storage().nbytes();
    const int most = tensor.scalar_type() == at::kBool ? 1 : 255;
    for (size_t index = 0; index < count; ++index) bytes[index] = static_cast<unsigned char>(draw(0, most));
  }

  std::atomic<bool> is_closing_{false};
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> views_;
  std::optional<shm::SlabPool> pool_;
  std::optional<SlabWriter> writer_;
};

}  // namespace penstock::worker
