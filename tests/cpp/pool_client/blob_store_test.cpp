// SPDX-License-Identifier: Apache-2.0
#include "pool_client/blob_store.h"

#include <gtest/gtest.h>

namespace penstock::pool_client {
namespace {

wire::BlobId id_of(uint8_t number) {
  wire::BlobId id{};
  id[0] = static_cast<std::byte>(number);
  return id;
}

TEST(BlobStore, APrefixThatNoRequestNamesAnyMoreIsDropped) {
  BlobStore store;
  store.put(id_of(1), "the job");
  auto current = store.name({id_of(1)});
  for (uint8_t number = 10; number < 200; ++number) {
    store.put(id_of(number), "a prefix");
    current = store.name({id_of(1), id_of(number)});
  }
  EXPECT_LE(store.size(), 3u);
  EXPECT_NE(store.find(id_of(1)), nullptr);
  EXPECT_NE(store.find(id_of(199)), nullptr);
  EXPECT_EQ(store.find(id_of(10)), nullptr);
}

TEST(BlobStore, APrefixStaysWhileARequestNamesIt) {
  BlobStore store;
  store.put(id_of(1), "the job");
  store.put(id_of(2), "a prefix");
  const auto of_a_request = store.name({id_of(1), id_of(2)});
  for (int turn = 0; turn < 3; ++turn) static_cast<void>(store.name({id_of(1)}));
  EXPECT_NE(store.find(id_of(2)), nullptr);
}

TEST(BlobStore, WhatAJobNamesStays) {
  BlobStore store;
  store.put(id_of(1), "the job, which names the dataset");
  store.put(id_of(2), "the dataset");
  for (int turn = 0; turn < 3; ++turn) static_cast<void>(store.name({id_of(1)}));
  EXPECT_NE(store.find(id_of(2)), nullptr);
}

TEST(BlobStore, APrefixThatIsPutAgainIsThere) {
  BlobStore store;
  store.put(id_of(2), "a prefix");
  static_cast<void>(store.name({id_of(2)}));
  static_cast<void>(store.name({}));
  EXPECT_EQ(store.find(id_of(2)), nullptr);
  store.put(id_of(2), "a prefix");
  const auto current = store.name({id_of(2)});
  EXPECT_NE(store.find(id_of(2)), nullptr);
}

}  // namespace
}  // namespace penstock::pool_client
