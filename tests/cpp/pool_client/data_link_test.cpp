// SPDX-License-Identifier: Apache-2.0
#include "pool_client/data_link.h"

#include <gtest/gtest.h>

#include "../base/left_bytes.h"
#include "../net/pool_sockets.h"
#include "net/seal.h"

namespace penstock::pool_client {
namespace {

constexpr net::LinkName kLink{.trainer_id = 7, .worker_id = 5, .link = 3};

class DataLinkTest : public net::PoolSocketsTest {
 protected:
  const wire::SealOffer offer_{.ciphers = wire::kSealCiphers, .nonce = net::draw_seal_nonce().value()};
};

// Half of what its keys follow from lay in the link for as long as it lasted.
TEST_F(DataLinkTest, OfferIsWipedOnceTheKeysAreMadeOfIt) {
  DataLink link(kLink, offer_);
  EXPECT_TRUE(test::holds(link, offer_.nonce));
  const auto connected = link.connect(
      context_, *resolver_, {.nonce = net::draw_seal_nonce().value(), .data_endpoint = free_endpoint().text()});
  ASSERT_TRUE(connected) << connected.error().message;
  EXPECT_FALSE(test::holds(link, offer_.nonce));
}

TEST_F(DataLinkTest, OfferIsWipedWithALinkThatIsNeverGranted) {
  EXPECT_FALSE(test::leaves<DataLink>(offer_.nonce, kLink, offer_));
}

}  // namespace
}  // namespace penstock::pool_client
