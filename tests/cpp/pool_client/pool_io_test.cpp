// SPDX-License-Identifier: Apache-2.0
// Turns of the thread that speaks with a pool, one by one on the test's thread, against workers by hand.
#include "pool_client/pool_io.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../net/hand_data_server.h"
#include "../net/pool_sockets.h"
#include "hand_worker.h"

namespace penstock::pool_client {
namespace {

// Counts what becomes of the data connections of all workers.
class CountingData : public net::HandDataServer {
 public:
  struct Counts {
    std::atomic<size_t> joined{0};
    std::atomic<size_t> sent{0};  // pieces
  };

  CountingData(net::SocketContext& context, net::Authenticator& authenticator, uint64_t worker_id, Counts& counts)
      : HandDataServer(context, authenticator, worker_id), counts_(counts) {}

  Result<void> receive() {
    auto received = HandDataServer::receive();
    if (has_room() && !std::exchange(has_joined_, true)) counts_.joined.fetch_add(1);
    return received;
  }
  Result<void> send(const wire::PieceHead& head, std::span<const std::byte> piece) {
    auto sent = HandDataServer::send(head, piece);
    counts_.sent.fetch_add(1);
    return sent;
  }

 private:
  Counts& counts_;
  bool has_joined_ = false;
};

class PoolIoTest : public net::PoolSocketsTest {
 protected:
  static constexpr size_t kWorkerCount = 48;
  static constexpr uint64_t kBatchBytes = (1 << 20) - 4096;  // which fit a piece with their record

  PoolIoTest() {
    std::vector<OwnWorker> own;
    for (uint64_t id = 1; id <= kWorkerCount; ++id) {
      auto server = serve({.allowed_roles = {net::Role::kTrainer}}, net::Role::kWorker);
      own.push_back({.worker_id = id, .endpoint = server->endpoint()});
      workers_.push_back(std::make_unique<HandWorkerOf<CountingData>>(
          std::move(server), std::make_unique<CountingData>(context_, *authenticator_, id, counts_),
          HandWorkerOptions{.worker_id = id, .batch_bytes = kBatchBytes, .piece_bytes = 1 << 20}));
    }
    EXPECT_TRUE(stages_.start({}));
    io_ = std::make_unique<PoolIo>(options_, net::RunId{.id = 7},
                                   PoolDirectory(options_.keys, keys_.ring(net::Role::kTrainer), std::move(own)),
                                   stages_, inbox_);
    EXPECT_TRUE(io_->begin());
  }
  ~PoolIoTest() override {
    io_->end();
    io_.reset();
    for (const auto& worker : workers_) worker->end();
  }

  // Takes turns until what is waited for has come.
  [[nodiscard]] bool turn_until(const std::function<bool()>& is_over) {
    const auto deadline = Clock::now() + kPatience;
    while (!is_over()) {
      if (Clock::now() > deadline || !io_->serve() || !io_->wait(wake_fd_.get(), true)) return false;
    }
    return true;
  }

  // Of each batch there is one piece.
  void request_batches() {
    inbox_.set_epochs(1, 1);
    io_->begin_epoch(1, {});
    for (uint64_t sequence = 0; sequence < kWorkerCount; ++sequence) {
      auto content = std::make_shared<session::RequestContent>();
      content->request = {.index_kind = wire::IndexKind::kInteger, .sequence = sequence, .epoch = 1};
      content->indices.resize(sizeof(int64_t));
      content->seeds = std::make_shared<const std::vector<std::byte>>();
      content->blobs = std::make_shared<const std::vector<wire::BlobId>>(1);
      io_->ask(std::move(content));
    }
  }
  size_t take_batches() {
    size_t count = 0;
    while (const auto arrival = inbox_.try_pop()) count += arrival->kind == loader::Arrival::Kind::kBatch ? 1 : 0;
    return count;
  }

  CountingData::Counts counts_;
  std::vector<std::unique_ptr<HandWorkerOf<CountingData>>> workers_;
  const FileDescriptor wake_fd_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  const PoolIoOptions options_{.controller = std::nullopt,
                               .keys = keys_.ring(net::Role::kTrainer),
                               .job = "a test",
                               .about = "",
                               .worker_count_max = kWorkerCount,
                               .credit_bytes = 1 << 24,
                               .arena_bytes = 1 << 26};
  loader::Inbox inbox_{1 << 10};
  loader::StageChain stages_{inbox_, 1 << 10};
  std::unique_ptr<PoolIo> io_;
};

// All pieces that had come were opened in one turn, however many they were, while leases ran out.
TEST_F(PoolIoTest, PiecesThatAreOpenedInATurnAreBoundedAndTheOthersComeInTheNextOnes) {
  constexpr size_t kOpenedMax = (32 << 20) / kBatchBytes;
  static_assert(kWorkerCount > kOpenedMax);
  ASSERT_TRUE(turn_until([&] { return io_->worker_count() == kWorkerCount && counts_.joined == kWorkerCount; }));
  request_batches();
  ASSERT_TRUE(io_->serve()) << "the requests go out";
  const auto deadline = Clock::now() + kPatience;
  while (counts_.sent < kWorkerCount && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_EQ(counts_.sent, kWorkerCount);
  for (int count = 0; count < 50; ++count) {  // libzmq takes them out of the system's sockets meanwhile
    ASSERT_TRUE(io_->wait(wake_fd_.get(), false));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  size_t come_count = 0, most = 0;
  ASSERT_TRUE(turn_until([&] {
    const size_t count = take_batches();
    most = std::max(most, count);
    come_count += count;
    return come_count == kWorkerCount;
  }));
  EXPECT_LE(most, kOpenedMax);
}

}  // namespace
}  // namespace penstock::pool_client
