// SPDX-License-Identifier: Apache-2.0
#pragma once
// A controller on loopback with real sockets and keys, and clients of every role.

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "../net/pool_sockets.h"
#include "base/file_descriptor.h"
#include "controller/controller.h"
#include "net/control_limits.h"
#include "wire/control_record.h"

namespace penstock::controller {

// Whether strings end and brackets match, which a text that was cut off fails.
inline bool is_whole_json(const std::string& text) {
  std::string open;
  bool is_in_string = false;
  for (size_t place = 0; place < text.size(); ++place) {
    const char c = text[place];
    if (is_in_string && c == '\\') {
      ++place;
    } else if (c == '"') {
      is_in_string = !is_in_string;
    } else if (!is_in_string && (c == '{' || c == '[')) {
      open += c == '{' ? '}' : ']';
    } else if (!is_in_string && (c == '}' || c == ']')) {
      if (open.empty() || open.back() != c) return false;
      open.pop_back();
      if (open.empty()) return place + 1 == text.size();
    }
  }
  return false;
}

class ControllerTest : public net::PoolSocketsTest {
 protected:
  ControllerTest() { start({.host = "127.0.0.1", .port = 0}); }
  ~ControllerTest() override { stop(); }

  void start(const net::Endpoint& endpoint) {
    const auto deadline = Clock::now() + kPatience;
    auto started = Controller::start(endpoint, keys_.ring(net::Role::kController));
    while (!started && Clock::now() < deadline)
      started = Controller::start(endpoint, keys_.ring(net::Role::kController));
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

  std::unique_ptr<net::ClientSocket> join(net::Role role) {
    auto client = connect(endpoint_, keys_.pair(role), keys_.public_key(net::Role::kController),
                          {.limits = net::control_limits()});
    expect_connected(*client);
    return client;
  }
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

  static wire::WorkerReport worker(uint64_t id) {
    return {.worker_id = id, .incarnation = 1, .endpoint = "tcp://127.0.0.1:5", .about = "a \"worker\"\n\xff"};
  }
  static wire::TrainerReport trainer(uint64_t id) {
    return {.trainer_id = id, .job = "train.py", .worker_count_max = 8, .queue = {.ready_batches = 3}};
  }
  // Reports until the controller has settled.
  static wire::TrainerRoster settled(net::ClientSocket& worker_client, net::ClientSocket& trainer_client) {
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

  static void expect_all_served(net::ClientSocket& worker_client, net::ClientSocket& trainer_client,
                                net::ClientSocket& operator_client) {
    EXPECT_TRUE(std::holds_alternative<wire::WorkerOrders>(exchange(worker_client, worker(7))));
    EXPECT_TRUE(std::holds_alternative<wire::TrainerRoster>(exchange(trainer_client, trainer(9))));
    const auto status = exchange(operator_client, wire::StatusRequest{});
    ASSERT_TRUE(std::holds_alternative<wire::Status>(status));
    EXPECT_TRUE(is_whole_json(std::get<wire::Status>(status).json)) << std::get<wire::Status>(status).json;
  }

  FileDescriptor stop_fd_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Controller> controller_;
  net::Endpoint endpoint_;
  std::jthread thread_;
};

}  // namespace penstock::controller
