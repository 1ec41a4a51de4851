// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_cache.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/prefix_message.h"

namespace penstock::worker {
namespace {

using wire::BlobId;

BlobId id_of(int number) {
  BlobId id{};
  id[0] = static_cast<std::byte>(number);
  return id;
}

std::string key_of(int number) { return std::string(32, static_cast<char>('0' + number)); }

class PrefixCacheTest : public testing::Test {
 protected:
  // One whose boundary tensor has the key of the number.
  void put(int number) {
    const auto message = write_prefix_message(
        {.text = "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%y = aten::neg(%x)\noutput %y key \"" + key_of(number) +
                 "\"\n",
         .constants = {},
         .seed = 0,
         .library = {},
         .library_leaves = {}});
    ASSERT_TRUE(message);
    shelf_.put(id_of(number), message.value());
  }
  // The keys of the values made of a batch with those prefixes.
  std::vector<std::string> run(const std::vector<BlobId>& ids) {
    shelf_.select(ids, stage_);
    BatchContent content{.tensors = {at::ones({4})}, .boundary_keys = {}, .nest = {}};
    stage_.run(content, 0, 0);
    return content.boundary_keys;
  }

  PrefixCache shelf_;
  PrefixStage stage_;
};

using Keys = std::vector<std::string>;

TEST_F(PrefixCacheTest, ABatchIsMadeWithThePrefixesItNamesAndNoOthers) {
  put(1);
  put(2);
  EXPECT_EQ(run({id_of(1), id_of(2)}), (Keys{key_of(1), key_of(2)}));
  EXPECT_EQ(run({id_of(2)}), (Keys{key_of(2)}));
  EXPECT_EQ(run({}), (Keys{}));
  EXPECT_EQ(run({id_of(2)}), (Keys{key_of(2)}));
}

TEST_F(PrefixCacheTest, ThoseOfTheLastTwoListsAreKept) {
  put(1);
  run({id_of(1)});
  put(2);
  run({id_of(2)});
  EXPECT_TRUE(shelf_.has(id_of(1)));
  put(3);
  run({id_of(3)});
  EXPECT_FALSE(shelf_.has(id_of(1)));
  EXPECT_TRUE(shelf_.has(id_of(2)));
}

TEST_F(PrefixCacheTest, OneThatCannotBeReadOrIsNotThereIsLeftOut) {
  shelf_.put(id_of(1), {});
  put(2);
  EXPECT_TRUE(shelf_.has(id_of(1)));
  EXPECT_EQ(run({id_of(1), id_of(2), id_of(3)}), (Keys{key_of(2)}));
}

}  // namespace
}  // namespace penstock::worker
