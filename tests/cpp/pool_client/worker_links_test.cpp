// SPDX-License-Identifier: Apache-2.0
#include "pool_client/worker_links.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>

#include "../base/left_bytes.h"
#include "../net/pool_sockets.h"
#include "base/clock.h"
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

using net::ConnectionEvent;
using net::Role;
using std::chrono::milliseconds;

using Workers = std::set<uint64_t>;

class WorkerLinksTest : public net::PoolSocketsTest {
 protected:
  void open(uint64_t worker_id, const net::ServerSocket& server) {
    ASSERT_TRUE(links_.open(worker_id, server.endpoint(), connect(server, Role::kTrainer)));
  }

  // Waits for the next event of a worker's connection, as the I/O thread does.
  std::optional<ConnectionEvent> next_event(uint64_t worker_id) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      for (const uint64_t ready : await(kPatience)) {
        auto event = links_.find(ready)->socket().try_event();
        links_.note_served(ready);
        if (event && ready == worker_id) return event;
      }
    }
    return std::nullopt;
  }
  Workers await(milliseconds timeout) {
    const auto tags = ready_set_->wait(timeout);
    EXPECT_TRUE(tags);
    for (const uint64_t tag : tags.value()) links_.note_ready(tag);
    return links_.take_ready(clock_now());
  }
  void expect_calm() {
    const auto deadline = Clock::now() + kPatience;
    while (!await(milliseconds(20)).empty()) ASSERT_LT(Clock::now(), deadline);
  }

  std::unique_ptr<net::ReadySet> ready_set_ = net::ReadySet::open().value();
  WorkerLinks links_{*ready_set_};
};

TEST_F(WorkerLinksTest, OnlyTheLinkThatHasSomethingIsReady) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  for (const uint64_t worker_id : {5, 6, 7}) {
    open(worker_id, *server);
    ASSERT_EQ(next_event(worker_id)->kind, ConnectionEvent::Kind::kConnected);
  }
  expect_calm();
  links_.send(6, filled(1, 1));
  const auto question = next_message(*server);
  ASSERT_TRUE(question);
  EXPECT_TRUE(await(milliseconds(0)).empty());
  ASSERT_TRUE(server->send(question->peer.routing_id, filled(1, 2)));
  EXPECT_EQ(await(kPatience), Workers{6});
  EXPECT_TRUE(links_.take_ready(clock_now()).empty()) << "once";
  links_.close(6, milliseconds(0));
  expect_calm();
}

TEST_F(WorkerLinksTest, MessageThatCameBeforeOneWasSentIsNotForgotten) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  open(5, *server);
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kConnected);
  links_.send(5, filled(1, 1));
  const auto question = next_message(*server);
  ASSERT_TRUE(question);
  expect_calm();
  ASSERT_TRUE(server->send(question->peer.routing_id, filled(1, 2)));
  // To see that it waits, and to send, takes up what its descriptor had to tell.
  ASSERT_TRUE(net::wait_readable(links_.find(5)->socket().waitables(), {}, {}, kPatience));
  links_.send(5, filled(1, 3));
  EXPECT_EQ(await(milliseconds(0)), Workers{5});
}

TEST_F(WorkerLinksTest, LinkWhoseTimeHasComeIsReadyThoughNothingCame) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  open(5, *server);
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kConnected);
  EXPECT_FALSE(links_.due_at());
  server.reset();
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kDisconnected);
  expect_calm();
  const auto lost = links_.due_at();
  ASSERT_TRUE(lost);
  const auto refused = *lost - milliseconds(500);
  links_.find(5)->reconnect_at = refused;
  links_.note_served(5);
  EXPECT_EQ(links_.due_at(), refused);
  EXPECT_TRUE(links_.take_ready(refused - milliseconds(1)).empty());
  EXPECT_EQ(links_.take_ready(refused), Workers{5});
  links_.find(5)->reconnect_at.reset();
  links_.note_served(5);
  EXPECT_EQ(links_.due_at(), lost);
  links_.close(5, milliseconds(0));
  EXPECT_FALSE(links_.due_at());
  EXPECT_TRUE(links_.take_ready(*lost).empty());
}

TEST_F(WorkerLinksTest, LinkThatWasServedAtItsTimeIsAskedForWhatThatTookUp) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  open(5, *server);
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kConnected);
  links_.send(5, filled(1, 1));
  const auto question = next_message(*server);
  ASSERT_TRUE(question);
  expect_calm();
  const auto due = clock_now();
  links_.find(5)->reconnect_at = due;
  links_.note_served(5);
  ASSERT_TRUE(server->send(question->peer.routing_id, filled(1, 2)));
  ASSERT_TRUE(net::wait_readable(links_.find(5)->socket().waitables(), {}, {}, kPatience));
  ASSERT_EQ(links_.take_ready(due), Workers{5});
  links_.find(5)->reconnect_at.reset();
  links_.note_served(5);
  EXPECT_EQ(await(milliseconds(0)), Workers{5});
}

TEST_F(WorkerLinksTest, LinkTakesThePlaceOfAnother) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto other = serve({.allowed_roles = {Role::kTrainer}});
  open(5, *server);
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kConnected);
  open(5, *other);
  ASSERT_EQ(next_event(5)->kind, ConnectionEvent::Kind::kConnected);
  EXPECT_EQ(links_.find(5)->endpoint(), other->endpoint());
  links_.send(5, filled(1, 1));
  EXPECT_TRUE(next_message(*other));
}

}  // namespace
}  // namespace penstock::pool_client
