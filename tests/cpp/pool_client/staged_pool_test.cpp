// SPDX-License-Identifier: Apache-2.0
// Batches that a pool's worker wrote with fewer bytes, on their way to a device without hardware.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../loader/fake_device.h"
#include "../loader/slab_batches.h"
#include "../net/pool_sockets.h"
#include "../wire/narrow_samples.h"
#include "hand_worker.h"
#include "loader/copy_stage.h"
#include "pool_client/pool_client.h"

namespace penstock::pool_client {
namespace {

using Event = loader::Client::Event;
using net::Role;

class FakeDevicePool final : public PoolSource {
 public:
  FakeDevicePool(PoolIoOptions options, net::KeyRing keys, std::vector<OwnWorker> workers, loader::FakeGpu& gpu)
      : PoolSource(std::move(options), net::RunId{.id = 7}, std::move(keys), std::move(workers)), gpu_(gpu) {}

  // The I/O thread ends before this object becomes a PoolSource again.
  ~FakeDevicePool() override { stop(); }

  Result<void> start(loader::Stages) override {
    loader::Stages stages;
    stages.in_order.push_back(std::make_unique<loader::CopyStage>(std::make_unique<loader::FakeDevice>(gpu_)));
    return PoolSource::start(std::move(stages));
  }

 private:
  loader::FakeGpu& gpu_;
};

class StagedPoolTest : public net::PoolSocketsTest {
 protected:
  ~StagedPoolTest() override {
    if (client_) client_->stop();
    if (worker_) worker_->end();
    gpu_.wait_until_idle();
  }

  // A tensor in each of the encodings.
  static std::vector<wire::NarrowSample> samples_of(uint64_t sequence) {
    std::mt19937_64 random(sequence);
    std::vector<wire::NarrowSample> samples;
    for (const wire::Encoding encoding : wire::kNarrowEncodings)
      samples.push_back(wire::random_narrow(encoding, 10, random));
    return samples;
  }

  static MadeBatch make(const std::vector<wire::NarrowSample>& samples) {
    std::vector<wire::TensorEntry> entries;
    MadeBatch made;
    for (const auto& sample : samples) {
      entries.push_back(sample.entry);
      made.payload.insert(made.payload.end(), sample.narrow.begin(), sample.narrow.end());
      made.payload.resize(align_up(made.payload.size(), wire::kPayloadAlignment));
    }
    const auto record = wire::make_record(entries, wire::nest_of_tensors(static_cast<uint32_t>(entries.size())));
    made.record_bytes = static_cast<uint32_t>(record.size());
    made.payload.insert(made.payload.end(), record.begin(), record.end());
    return made;
  }

  void start(std::function<MadeBatch(uint64_t)> make_batch) {
    auto server = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
    const auto endpoint = server->endpoint();
    HandWorker::Options options;
    options.make = std::move(make_batch);
    worker_ = std::make_unique<HandWorker>(
        std::move(server),
        net::DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0}, {.worker_id = 5}, [] {})
            .value(),
        options);
    auto source = std::make_unique<FakeDevicePool>(
        PoolIoOptions{.controller = free_endpoint(),
                      .keys = keys_.ring(Role::kTrainer),
                      .job = "a test",
                      .about = "",
                      .worker_count_max = 1,
                      .credit_bytes = 1 << 24,
                      .arena_bytes = 1 << 24},
        keys_.ring(Role::kTrainer), std::vector<OwnWorker>{{.worker_id = 5, .endpoint = endpoint}}, gpu_);
    PoolSource& pool = *source;
    client_ = std::make_unique<PoolClient>(
        loader::ClientOptions{.worker_count = 1, .shard_count = 1, .keep_workers = true}, pool, std::move(source));
    client_->use_blobs({wire::BlobId{}});
    ASSERT_TRUE(client_->start());
    client_->begin_epoch(std::as_bytes(std::span(std::string_view("seeds"))));
  }

  std::unique_ptr<loader::Batch> next_batch() {
    client_->submit({.kind = wire::IndexKind::kInteger, .body = std::as_bytes(std::span(&index_, 1))});
    ++index_;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (;;) {
      Event event = client_->try_next();
      if (event.kind == Event::Kind::kBatch) {
        client_->count_delivered(*event.batch);
        return std::move(event.batch);
      }
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no batch came");
      client_->wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
    }
  }

  void expect_stream(int count) {
    for (int sequence = 0; sequence < count; ++sequence) {
      const auto batch = next_batch();
      ASSERT_FALSE(batch->record().remote_error()) << batch->record().remote_error()->text;
      gpu_.run_on_current([tensors = batch->tensors().all(), sequence] {
        const auto samples = samples_of(static_cast<uint64_t>(sequence));
        ASSERT_EQ(tensors.size(), samples.size());
        for (size_t index = 0; index < samples.size(); ++index)
          EXPECT_TRUE(loader::has_bytes(tensors[index], samples[index].widened())) << sequence << " " << index;
      });
    }
    gpu_.wait_until_idle();
  }

  loader::FakeGpu gpu_;
  int64_t index_ = 0;
  std::unique_ptr<HandWorker> worker_;
  std::unique_ptr<PoolClient> client_;
};

TEST_F(StagedPoolTest, NarrowBatchesAreWidenedOnTheDevice) {
  gpu_.shuffle(3);
  start([](uint64_t sequence) { return make(samples_of(sequence)); });
  expect_stream(30);
  EXPECT_EQ(client_->counters().device_widened_batches.value(), 30u);
  EXPECT_EQ(gpu_.widened_count(), 30u * 6);
}

// They were copied as memory that the device cannot read by itself, which holds up the thread that copies.
TEST_F(StagedPoolTest, TheSlabsThatBatchesCameIntoAreRegistered) {
  start([](uint64_t sequence) { return make(samples_of(sequence)); });
  expect_stream(5);
  EXPECT_FALSE(gpu_.registered().empty());
}

TEST_F(StagedPoolTest, WithoutKernelsTheyAreWidenedBeforeTheirCopyAndAreTheSame) {
  gpu_.take_kernels_away();
  start([](uint64_t sequence) { return make(samples_of(sequence)); });
  expect_stream(30);
  EXPECT_EQ(client_->counters().device_widened_batches.value(), 0u);
  EXPECT_EQ(gpu_.widened_count(), 0u);
}

// A kernel would read beyond the end of the rows.
TEST_F(StagedPoolTest, DamagedBytesAreAnErrorAndReachNoDevice) {
  start([](uint64_t) {
    std::mt19937_64 random(4);
    auto sample = wire::random_narrow(wire::Encoding::kRows, 10, random);
    sample.narrow[7] = std::byte{0x80};  // the highest byte of the first row's number
    return make({sample});
  });
  const auto batch = next_batch();
  ASSERT_TRUE(batch->record().remote_error());
  EXPECT_NE(batch->record().remote_error()->text.find("it refers to a missing row"), std::string::npos)
      << batch->record().remote_error()->text;
  EXPECT_EQ(gpu_.widened_count(), 0u);
  EXPECT_EQ(gpu_.used_bytes(), 0u);
}

TEST_F(StagedPoolTest, ADeviceThatIsLostIsAnErrorInThePlaceOfANarrowBatch) {
  start([](uint64_t sequence) { return make(samples_of(sequence)); });
  expect_stream(2);
  gpu_.lose();
  const auto batch = next_batch();
  ASSERT_TRUE(batch->record().remote_error());
  EXPECT_NE(batch->record().remote_error()->text.find("fake:0"), std::string::npos)
      << batch->record().remote_error()->text;
}

}  // namespace
}  // namespace penstock::pool_client
