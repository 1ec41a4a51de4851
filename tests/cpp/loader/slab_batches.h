// SPDX-License-Identifier: Apache-2.0
#pragma once
// An arena of small slabs in this process, and batches in them, without a worker.

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "../wire/narrow_samples.h"
#include "../wire/record_samples.h"
#include "loader/batch.h"
#include "shm/arena.h"

namespace penstock::loader {

class SlabBatches {
 public:
  static constexpr uint64_t kRecordOffset = 1 << 16;

  explicit SlabBatches(uint32_t slab_count)
      : arena_(shm::Arena::create({.slab_bytes = 2 * kRecordOffset, .slab_count = slab_count}, 0).value()),
        view_(shm::ArenaView::map(FileDescriptor(::dup(arena_->fd()))).value()) {}

  // A batch of int64 `tensor_count` x `element_count` that holds `value` everywhere, or nullptr if no slab is free.
  std::unique_ptr<Batch> make(int64_t value, int64_t element_count = 1000, int64_t tensor_count = 1,
                              wire::BatchFacts facts = {}) {
    const std::vector<wire::TensorEntry> entries(static_cast<size_t>(tensor_count),
                                                 wire::make_entry(4, {element_count}));
    return make(entries, facts,
                [&](std::byte* slab) { std::fill_n(reinterpret_cast<int64_t*>(slab), kRecordOffset / 8, value); });
  }

  // A batch of tensors that came with fewer bytes. Nobody has checked them.
  std::unique_ptr<Batch> make_narrow(std::span<const wire::NarrowSample> samples, wire::BatchFacts facts = {}) {
    std::vector<wire::TensorEntry> entries;
    for (const wire::NarrowSample& sample : samples) entries.push_back(sample.entry);
    return make(entries, facts, [&](std::byte* slab) {
      for (const wire::NarrowSample& sample : samples) {
        std::memcpy(slab, sample.narrow.data(), sample.narrow.size());
        slab += align_up(sample.narrow.size(), wire::kPayloadAlignment);
      }
    });
  }

  // A batch of these tensors, whose bytes `write` writes to the slab.
  template <typename Write>
  std::unique_ptr<Batch> make(const std::vector<wire::TensorEntry>& entries, wire::BatchFacts facts,
                              const Write& write) {
    const auto slab_index = arena_->try_acquire();
    if (!slab_index) return nullptr;
    EXPECT_TRUE(arena_->reserve(*slab_index, arena_->slab_bytes()));
    std::byte* slab = arena_->slab(*slab_index);
    write(slab);
    const auto record = wire::make_record(entries, wire::nest_of_tensors(static_cast<uint32_t>(entries.size())));
    PENSTOCK_ASSERT(wire::parse_frame(record).value().payload_bytes <= kRecordOffset, "the slab is too small");
    std::memcpy(slab + kRecordOffset, record.data(), record.size());
    facts.record_bytes = static_cast<uint32_t>(record.size());
    facts.record_offset = kRecordOffset;
    facts.slab_bytes = arena_->backed_bytes(*slab_index);
    auto lease = c10::make_intrusive<SlabLease>(view_, *slab_index, arena_->generation(*slab_index));
    return Batch::from_slab(facts, std::move(lease), /*allow_pickle=*/true).value();
  }

  // How many slabs a worker could write to now.
  uint32_t free_count() {
    std::vector<uint32_t> taken;
    while (const auto index = arena_->try_acquire()) taken.push_back(*index);
    for (const uint32_t index : taken) arena_->cancel(index);
    return static_cast<uint32_t>(taken.size());
  }

  shm::Arena& arena() { return *arena_; }
  const std::shared_ptr<shm::ArenaView>& view() const { return view_; }

 private:
  std::shared_ptr<shm::Arena> arena_;
  std::shared_ptr<shm::ArenaView> view_;  // shared with the leases
};

inline bool has_bytes(const at::Tensor& tensor, std::span<const std::byte> bytes) {
  return tensor.storage().nbytes() == bytes.size() &&
         std::memcmp(tensor.storage().data(), bytes.data(), bytes.size()) == 0;
}

inline bool is_all(const at::Tensor& tensor, int64_t value) {
  const auto* numbers = tensor.const_data_ptr<int64_t>();
  return std::all_of(numbers, numbers + tensor.numel(), [&](int64_t number) { return number == value; });
}

}  // namespace penstock::loader
