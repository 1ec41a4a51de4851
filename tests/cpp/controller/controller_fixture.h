// SPDX-License-Identifier: Apache-2.0
#pragma once
// A controller on loopback with real sockets and keys, and clients of every role.

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "../net/pool_sockets.h"
#include "base/file_descriptor.h"
#include "controller/controller.h"
#include "net/tcp_socket.h"
#include "wire/control_record.h"

namespace penstock::controller {

// An answer to an operator. A text that is not JSON fails the test, and gives a discarded value.
inline nlohmann::json parsed(const std::string& text) {
  auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(json.is_discarded()) << text;
  return json;
}

class ControllerTest : public net::PoolSocketsTest {
 protected:
  ControllerTest() { start({.host = "127.0.0.1", .port = 0}); }
  ~ControllerTest() override { stop(); }

  void start(const net::Endpoint& endpoint) {
    const auto deadline = Clock::now() + kPatience;
    const net::KeyRing keys = keys_.ring(net::Role::kController, net::KeyOrigin::kGiven, {{anns_.public_key(), "ann"}},
                                         {{betas_.public_key(), "beta"}});
    auto started = Controller::start(endpoint, keys);
    while (!started && Clock::now() < deadline) started = Controller::start(endpoint, keys);
    ASSERT_TRUE(started) << started.error().message;
    controller_ = std::move(started).value();
    endpoint_ = controller_->endpoint();
    thread_ = std::jthread([this] { EXPECT_TRUE(controller_->run(stop_fd_.get())); });
  }
  void stop() {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    ASSERT_EQ(::write(stop_fd_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    thread_.join();
    uint64_t count = 0;
    ASSERT_EQ(::read(stop_fd_.get(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
    controller_.reset();
  }

  std::unique_ptr<net::ClientSocket> join(const net::KeyPair& pair) {
    auto client = connect(endpoint_, pair, keys_.public_key(net::Role::kController), {.limits = net::control_limits()});
    expect_connected(*client);
    return client;
  }
  std::unique_ptr<net::ClientSocket> join(net::Role role) { return join(keys_.pair(role)); }
  static wire::ControlMessage exchange(net::ClientSocket& client, const wire::ControlMessage& message) {
    EXPECT_TRUE(client.send(wire::write_control(message)));
    return next(client);
  }
  static wire::ControlMessage next(net::ClientSocket& client) {
    const auto receipt = next_message(client);
    EXPECT_TRUE(receipt);
    if (!receipt) return {};
    const auto parsed = wire::parse_control(receipt->parts.at(0).bytes());
    EXPECT_TRUE(parsed) << parsed.error().message;
    return parsed ? parsed.value() : wire::ControlMessage{};
  }

  // The first orders that are as wanted, in answer to this report or pushed.
  static wire::WorkerOrders orders_when(net::ClientSocket& client, const wire::WorkerReport& report,
                                        bool (*is_wanted)(const wire::WorkerOrders&)) {
    EXPECT_TRUE(client.send(wire::write_control(report)));
    for (;;) {
      const auto message = next(client);
      const auto* orders = std::get_if<wire::WorkerOrders>(&message);
      EXPECT_NE(orders, nullptr);
      if (orders == nullptr || is_wanted(*orders)) return orders == nullptr ? wire::WorkerOrders{} : *orders;
    }
  }

  // A run with the key of the role, by its number in the test.
  const net::RunId& run(net::Role role, int number) {
    const auto [place, is_new] = runs_.try_emplace({role, number});
    if (is_new) place->second = net::draw_run_id(keys_.public_key(role));
    return place->second;
  }
  uint64_t id_of(net::Role role, int number) { return run(role, number).id; }
  wire::WorkerReport worker(int number) {
    const net::RunId& of = run(net::Role::kWorker, number);
    return {.worker_id = of.id,
            .incarnation = 1,
            .endpoint = "tcp://127.0.0.1:5",
            .about = "a \"worker\"\n\xff",
            .secret = of.secret};
  }
  wire::TrainerReport trainer(int number) {
    const net::RunId& of = run(net::Role::kTrainer, number);
    return {.trainer_id = of.id,
            .job = "train.py",
            .worker_count_max = 8,
            .queue = {.ready_batches = 3},
            .secret = of.secret};
  }
  static wire::Deregistration deregistration(const wire::WorkerReport& last) {
    return {.id = last.worker_id, .is_worker = true, .secret = last.secret};
  }
  static wire::Deregistration deregistration(const wire::TrainerReport& last) {
    return {.id = last.trainer_id, .is_worker = false, .secret = last.secret};
  }
  // Reports until the controller has settled.
  wire::TrainerRoster settled(net::ClientSocket& worker_client, net::ClientSocket& trainer_client) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      EXPECT_TRUE(std::holds_alternative<wire::WorkerOrders>(exchange(worker_client, worker(7))));
      const auto answer = exchange(trainer_client, trainer(9));
      const auto* roster = std::get_if<wire::TrainerRoster>(&answer);
      EXPECT_NE(roster, nullptr);
      if (roster == nullptr || !roster->entries.empty()) return roster == nullptr ? wire::TrainerRoster{} : *roster;
      // A roster that is pushed comes before the next interval is over.
      const net::Waitable waitables[] = {trainer_client.waitables()[0]};
      EXPECT_TRUE(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(200)));
    }
    ADD_FAILURE() << "the controller never assigned the worker";
    return {};
  }

  void expect_all_served(net::ClientSocket& worker_client, net::ClientSocket& trainer_client,
                         net::ClientSocket& operator_client) {
    EXPECT_TRUE(std::holds_alternative<wire::WorkerOrders>(exchange(worker_client, worker(7))));
    EXPECT_TRUE(std::holds_alternative<wire::TrainerRoster>(exchange(trainer_client, trainer(9))));
    const auto status = exchange(operator_client, wire::StatusRequest{});
    ASSERT_TRUE(std::holds_alternative<wire::Status>(status));
    parsed(std::get<wire::Status>(status).json);
  }

  const net::KeyPair anns_ = net::KeyPair::generate();   // of the user ann
  const net::KeyPair betas_ = net::KeyPair::generate();  // of the machine beta
  std::map<std::pair<net::Role, int>, net::RunId> runs_;
  FileDescriptor stop_fd_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Controller> controller_;
  net::Endpoint endpoint_;
  std::jthread thread_;
};

}  // namespace penstock::controller
