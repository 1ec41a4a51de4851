// SPDX-License-Identifier: Apache-2.0
#include "worker/sharing.h"

#include <gtest/gtest.h>

#include <vector>

#include "batch_fixture.h"
#include "megabyte.h"
#include "shared_tensor.h"

namespace penstock::worker {
namespace {

constexpr int64_t kLarge = 2 * kSharedBytesMin / sizeof(float);

class SharingTest : public BatchTest {
 protected:
  SharingTest() { open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2}); }

  static std::vector<std::optional<uint32_t>> places_of(std::vector<at::Tensor> tensors,
                                                        std::vector<std::string> keys = {}) {
    return leaves_to_share({.tensors = std::move(tensors), .boundary_keys = std::move(keys), .nest = {}})
        .storage_of_leaf;
  }
};

using Places = std::vector<std::optional<uint32_t>>;

TEST_F(SharingTest, LargeTensorsInSharedMemoryAreSharedByTheirStorage) {
  const auto first = in_shared_memory(kLarge);
  const auto second = in_shared_memory(kLarge);
  const auto own = at::arange(kLarge);
  EXPECT_EQ(places_of({own, second, first, second.slice(0, 10)}), (Places{std::nullopt, 0, 1, 0}));
}

TEST_F(SharingTest, ASmallTensorIsCopiedUnlessALargeOneIsOnItsStorage) {
  const auto tensor = in_shared_memory(kLarge);
  EXPECT_EQ(places_of({tensor.slice(0, 0, 10)}), Places{});
  EXPECT_EQ(places_of({tensor.slice(0, 0, 10), tensor}), (Places{0, 0}));
}

TEST_F(SharingTest, BoundaryTensorsAreCopied) {
  const auto tensor = in_shared_memory(kLarge);
  EXPECT_EQ(places_of({tensor}, {kKey}), Places{});
  EXPECT_EQ(places_of({tensor, tensor}, {kKey}), Places{0});
}

TEST_F(SharingTest, StoragesBeyondTheCapAreCopied) {
  std::vector<at::Tensor> tensors;
  for (uint32_t count = 0; count < wire::kSharedFileCountMax + 3; ++count) tensors.push_back(in_shared_memory(kLarge));
  const auto places = places_of(tensors);
  EXPECT_EQ(places[wire::kSharedFileCountMax - 1], wire::kSharedFileCountMax - 1);
  EXPECT_EQ(places[wire::kSharedFileCountMax], std::nullopt);
}

TEST_F(SharingTest, ASealedBatchNamesTheFileAndCopiesTheRest) {
  const auto shared = in_shared_memory(kLarge);
  const auto own = at::arange(5);
  wire::NestWriter nest;
  nest.none();
  BatchContent content{.tensors = {own, shared.slice(0, 3)}, .boundary_keys = {}, .nest = nest.view()};
  content.shared = leaves_to_share(content);
  const auto sealed = writer_->seal(content);
  ASSERT_TRUE(sealed);
  ASSERT_EQ(sealed.value().shared.size(), 1u);
  EXPECT_TRUE(sealed.value().shared[0].is_alias_of(shared.storage()));
  const auto frame = frame_of(sealed.value());
  EXPECT_EQ(frame.tensors[1].encoding, wire::Encoding::kShared);
  EXPECT_EQ(frame.tensors[1].offset, 12u);
  EXPECT_EQ(frame.payload_bytes, 64u);
}

TEST_F(SharingTest, ASharedTensorStaysSharedWhenTheBatchMovesToALargerSlab) {
  const auto shared = in_shared_memory(kLarge);
  const auto own = at::arange(static_cast<int64_t>(3 * kMegabyte / 8));
  wire::NestWriter nest;
  nest.none();
  BatchContent content{.tensors = {shared, own}, .boundary_keys = {}, .nest = nest.view()};
  content.shared = leaves_to_share(content);
  const auto sealed = writer_->seal(content);
  ASSERT_TRUE(sealed);
  EXPECT_EQ(frame_of(sealed.value()).tensors[0].encoding, wire::Encoding::kShared);
  EXPECT_EQ(frame_of(sealed.value()).tensors[0].offset, 0u);
  EXPECT_GE(frame_of(sealed.value()).payload_bytes, 3 * kMegabyte);
}

}  // namespace
}  // namespace penstock::worker
