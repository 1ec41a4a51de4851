// SPDX-License-Identifier: Apache-2.0
// A leader's relay on loopback with real sockets and keys, and a follower by hand.
#include "replica/relay.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "../net/pool_sockets.h"
#include "../worker/pool_trainer.h"
#include "wire/nest.h"

namespace penstock::replica {
namespace {

using net::Role;

class RelayTest : public net::PoolSocketsTest {
 protected:
  RelayTest() {
    nest_.tensor(0);
    RelayOptions options{.leader = "rank 0",
                         .keys = net::KeyPair::parse_secret(keys_.pair(Role::kWorker).secret_text().text()).value(),
                         .bind_host = "127.0.0.1",
                         .arena_bytes = 64 << 20,
                         .held_bytes_max = 1 << 20,
                         .followers = {{.name = "rank 1", .key = keys_.public_key(Role::kTrainer)}}};
    relay_ = Relay::start(std::move(options)).value();
    const auto& address = relay_->addresses().front();
    auto client = connect(net::Endpoint::parse(address.endpoint).value(), keys_.pair(Role::kTrainer),
                          keys_.public_key(Role::kWorker));
    expect_connected(*client);
    follower_ = std::make_unique<worker::PoolTrainer>(context_, *resolver_, std::move(client),
                                                      net::draw_run_id(keys_.public_key(Role::kTrainer)));
    follower_->begin(address.worker_id);
  }

  // The leader asks for the batch of one index, its sequence, and is given this tensor.
  void lead(int64_t sequence, const at::Tensor& tensor) {
    const auto number = static_cast<uint64_t>(sequence);
    const auto index = std::as_bytes(std::span(&sequence, 1));
    relay_->asked({.request = {.index_kind = wire::IndexKind::kIntegers, .sequence = number, .epoch = 1},
                   .indices = {index.begin(), index.end()}});
    const auto view = nest_.view();
    loader::Arrival arrival{.epoch = 1,
                            .sequence = number,
                            .batch = loader::Batch::from_tensors(
                                {.sequence = number, .epoch = 1},
                                {.tensors = {tensor}, .boundary_keys = {}, .nest = {view.begin(), view.end()}}),
                            .error = {}};
    relay_->arrived(arrival);
  }

  wire::NestWriter nest_;
  std::shared_ptr<Relay> relay_;  // shared with nobody here
  std::unique_ptr<worker::PoolTrainer> follower_;
};

TEST_F(RelayTest, HandsTheLeadersBatchOn) {
  lead(0, at::ones({5}));
  follower_->ask(0, {.indices = {0}});
  EXPECT_EQ(follower_->answer(0).kind, wire::AnswerKind::kBatch);
  EXPECT_EQ(relay_->handed_count(), 1u);
  EXPECT_FALSE(relay_->failure());
}

// The program was ended by std::terminate, and nobody knew why. No record can have a quantized tensor, which is our own
// fault to hand on, so the thread throws.
TEST_F(RelayTest, ThreadThatThrowsIsTheLeadersErrorAndNamesTheFollower) {
  lead(0, at::quantize_per_tensor(at::ones({5}), 1.0, 0, at::kQInt8));
  follower_->ask(0, {.indices = {0}});
  ASSERT_TRUE(follower_->serve_until([&] { return relay_->failure().has_value(); }));
  const std::string text = relay_->failure()->message;
  EXPECT_NE(text.find("pk_relay"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("not plain"), std::string::npos) << text;
}

}  // namespace
}  // namespace penstock::replica
