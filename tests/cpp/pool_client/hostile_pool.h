// SPDX-License-Identifier: Apache-2.0
#pragma once
// An epoch of a trainer whose pool does not keep to the protocol: workers and a controller by hand, on real sockets.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "../net/hand_data_server.h"
#include "../net/pool_sockets.h"
#include "hand_worker.h"
#include "loader/stream.h"
#include "net/tcp_socket.h"
#include "pool_client/pool_client.h"
#include "wire/control_record.h"

namespace penstock::pool_client {

// Answers each report of a trainer with the bytes that a test says. Runs on a thread of its own until it is destroyed.
class HandController {
 public:
  using Answer = std::function<std::vector<std::byte>(const wire::TrainerReport& report, int answered_count)>;

  HandController(std::unique_ptr<net::ServerSocket> server, Answer answer)
      : answer_(std::move(answer)),
        endpoint_(server->endpoint()),
        server_(std::move(server)),
        thread_([this](const std::stop_token& stop) { run(stop); }) {}

  const net::Endpoint& endpoint() const { return endpoint_; }
  int answered_count() const { return answered_count_.load(); }

 private:
  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      net::ServerReceipt receipt;
      while (server_->try_receive(receipt).value()) {
        const auto message = wire::parse_control(receipt.parts.at(0).bytes());
        const auto* report = message ? std::get_if<wire::TrainerReport>(&message.value()) : nullptr;
        if (report == nullptr) continue;
        static_cast<void>(server_->send(receipt.peer.routing_id, answer_(*report, answered_count_.load())));
        answered_count_.fetch_add(1);
      }
      const net::Waitable waitables[] = {server_->waitable()};
      static_cast<void>(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(10)));
    }
    server_.reset();  // on the thread that used it
  }

  const Answer answer_;
  const net::Endpoint endpoint_;
  std::unique_ptr<net::ServerSocket> server_;
  std::atomic<int> answered_count_{0};
  std::jthread thread_;
};

class HostilePool : private net::PoolSockets {
 public:
  using Worker = HandWorkerOf<net::HandDataServer>;
  using Event = loader::Client::Event;
  static constexpr int kBatchCount = 3;
  static constexpr uint64_t kBatchBytes = 1000;
  static constexpr std::string_view kJob = "the job";
  using net::PoolSockets::resident_bytes;

  ~HostilePool() {
    stream_.reset();
    if (client_) client_->stop();
    client_.reset();
    for (const auto& worker : workers_) worker->end();
    controller_.reset();
  }

  static wire::BlobId job_id() {
    wire::BlobId id{};
    id[0] = std::byte{9};
    return id;
  }

  // A worker of the pool, and where it listens. It has the key of `role`, whatever that is.
  net::Endpoint add_to_pool(HandWorker::Options options, net::HandDataServer::Alteration alter_head = {},
                            net::Role role = net::Role::kWorker) {
    auto server = serve({.allowed_roles = {net::Role::kTrainer}}, role);
    const net::Endpoint endpoint = server->endpoint();
    auto data = std::make_unique<net::HandDataServer>(context_, *authenticator_, options.worker_id, alter_head);
    workers_.push_back(std::make_unique<Worker>(std::move(server), std::move(data), std::move(options)));
    return endpoint;
  }
  // As rosters have it.
  wire::PublicKeyBytes key_of(net::Role role) const {
    wire::PublicKeyBytes bytes{};
    std::ranges::copy(keys_.public_key(role).bytes(), bytes.begin());
    return bytes;
  }
  // Of the worker that was added as this one.
  int hello_count(size_t place) const { return workers_.at(place)->hello_count(); }
  // A worker of the trainer's own.
  void add(const HandWorker::Options& options, net::HandDataServer::Alteration alter_head = {}) {
    own_.push_back({.worker_id = options.worker_id,
                    .endpoint = add_to_pool(options, std::move(alter_head)),
                    .handover = options.handover});
  }

  HandController& start_controller(HandController::Answer answer) {
    auto server = serve({.allowed_roles = {net::Role::kTrainer}, .limits = net::control_limits()});
    controller_ = std::make_unique<HandController>(std::move(server), std::move(answer));
    return *controller_;
  }

  void begin(PoolIoOptions::ReportedSize reported_size = {}) {
    auto source = std::make_unique<PoolSource>(
        PoolIoOptions{.controller = controller_ ? std::optional(controller_->endpoint()) : std::nullopt,
                      .keys = keys_.ring(net::Role::kTrainer),
                      .job = "a test",
                      .about = "",
                      .worker_count_max = 2,
                      .credit_bytes = 1 << 24,
                      .arena_bytes = 1 << 24,
                      .is_python = true,
                      .reported_size = std::move(reported_size),
                      .numerics = {1}},
        net::RunId{.id = 7}, keys_.ring(net::Role::kTrainer), own_);
    PoolSource& pool = *source;
    client_ = std::make_shared<PoolClient>(
        loader::ClientOptions{.worker_count = 1, .shard_count = 1, .keep_workers = true}, pool, std::move(source));
    client_->put_blob(job_id(), std::string(kJob));
    client_->use_blobs({job_id()});
    ASSERT_TRUE(client_->start());
    stream_ = std::make_unique<loader::Stream>(client_, loader::StreamOptions{.is_seeded_by_batch = true});
    begin_epoch();
  }

  // The epoch ends with its last batch, each one right. Where the text `named` is not empty, errors that have it may
  // come in the place of batches, or end the epoch.
  void expect_sound(std::string_view named) {
    std::string news;
    const auto is_named = [&](std::string_view text) { return !named.empty() && text.find(named) != text.npos; };
    const auto deadline = Clock::now() + kPatience;
    for (int count = 0; count <= kBatchCount;) {
      Event event = stream_->next(Clock::now() + std::chrono::milliseconds(100));
      if (event.kind == Event::Kind::kNews) news.append("\n").append(event.message());
      ASSERT_TRUE(event.kind != Event::Kind::kNothing || Clock::now() < deadline) << "hung after " << count << news;
      if (event.kind == Event::Kind::kFailed) {
        EXPECT_TRUE(is_named(event.message())) << event.message();
        return;
      }
      if (event.kind == Event::Kind::kEnd) {
        EXPECT_EQ(count, kBatchCount) << "short";
        EXPECT_TRUE(stream_->progress()->is_finished());
        return;
      }
      if (event.kind != Event::Kind::kBatch) continue;
      EXPECT_EQ(event.batch->record().facts().sequence, static_cast<uint64_t>(count++));
      if (const auto& error = event.batch->record().remote_error()) {
        EXPECT_TRUE(is_named(error->worker + " " + error->text)) << error->worker << ": " << error->text;
      } else {
        EXPECT_TRUE(is_right(*event.batch)) << "wrong data";
      }
    }
    FAIL() << "more batches than were asked for";
  }

  // Reads epochs until the user is told something with these words. False if that does not come in time.
  bool is_told(std::string_view words) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      const Event event = stream_->next(Clock::now() + std::chrono::milliseconds(100));
      if (event.kind == Event::Kind::kEnd) begin_epoch();
      if (event.kind == Event::Kind::kNews && event.message().find(words) != event.message().npos) return true;
    }
    return false;
  }
  // Reads this many batches, and returns what the user was told meanwhile.
  std::string news_of(int batch_count) {
    std::string news;
    const auto deadline = Clock::now() + kPatience;
    while (batch_count > 0 && Clock::now() < deadline) {
      const Event event = stream_->next(Clock::now() + std::chrono::milliseconds(100));
      if (event.kind == Event::Kind::kEnd) begin_epoch();
      if (event.kind == Event::Kind::kBatch) --batch_count;
      if (event.kind == Event::Kind::kNews) news.append("\n").append(event.message());
    }
    EXPECT_EQ(batch_count, 0);
    return news;
  }

  // The first batch, or what came in its place.
  std::unique_ptr<loader::Batch> first_batch() {
    for (;;) {
      Event event = stream_->next(Clock::now() + kPatience);
      if (event.kind == Event::Kind::kBatch || event.kind == Event::Kind::kNothing) return std::move(event.batch);
    }
  }

 private:
  void begin_epoch() {
    loader::TorchSamplerOptions order;
    order.sample_count = kBatchCount;
    stream_->begin_epoch({}, order);
  }

  static bool is_right(loader::Batch& batch) {
    const auto& tensors = batch.tensors().all();
    if (tensors.size() != 1 || static_cast<uint64_t>(tensors[0].numel()) != kBatchBytes) return false;
    const auto* data = tensors[0].const_data_ptr<uint8_t>();
    for (uint64_t place = 0; place < kBatchBytes; ++place)
      if (data[place] != static_cast<uint8_t>(batch.record().facts().sequence + place % 256)) return false;
    return true;
  }

  std::vector<OwnWorker> own_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<HandController> controller_;
  std::shared_ptr<PoolClient> client_;
  std::unique_ptr<loader::Stream> stream_;
};

}  // namespace penstock::pool_client
