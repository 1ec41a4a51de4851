// SPDX-License-Identifier: Apache-2.0
// Streams from worker processes to a device without hardware, as a C++ training loop with device= has them.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "loader/client.h"
#include "loader/client_io.h"
#include "loader/copy_stage.h"
#include "stream_fixture.h"

namespace penstock::loader {
namespace {

// Local workers whose batches go to the fake.
class FakeDeviceSource final : public ClientIo {
 public:
  FakeDeviceSource(const ClientIoOptions& options, FakeGpu& gpu, uint64_t staged_bytes_max)
      : ClientIo(options), gpu_(gpu), staged_bytes_max_(staged_bytes_max) {}

  // The I/O thread ends before this object becomes a ClientIo again.
  ~FakeDeviceSource() override { stop(); }

  Result<void> start(Stages) override {
    Stages stages{.in_order = {}, .staged_bytes_max = staged_bytes_max_};
    stages.in_order.push_back(std::make_unique<CopyStage>(std::make_unique<FakeDevice>(gpu_)));
    return ClientIo::start(std::move(stages));
  }

 private:
  FakeGpu& gpu_;
  uint64_t staged_bytes_max_;
};

class StagedClientTest : public StreamTest {
 protected:
  void TearDown() override {
    StreamTest::TearDown();
    gpu_.wait_until_idle();
    EXPECT_EQ(gpu_.used_bytes(), 0u);
  }

  void start_on_fake(const ClientOptions& options, uint64_t staged_bytes_max) {
    options_ = options;
    auto source = std::make_unique<FakeDeviceSource>(
        ClientIoOptions{.worker_count = options.worker_count,
                        .any_worker_depth = options.any_worker ? options.prefetch_factor : 0},
        gpu_, staged_bytes_max);
    start_workers(*source);
    client_ = std::make_shared<Client>(options, std::move(source));
    const auto started = client_->start();
    ASSERT_TRUE(started) << started.error().message;
  }

  // The sequences of the rest of the epoch, as they came. The trainer's stream compares their values.
  std::vector<uint64_t> finish_epoch_on_device() {
    std::vector<uint64_t> sequences;
    for (Event event = next(); event.kind == Event::Kind::kBatch && !HasFatalFailure(); event = next()) {
      const uint64_t sequence = event.batch->record().facts().sequence;
      sequences.push_back(sequence);
      gpu_.run_on_current(
          [this, tensors = event.batch->tensors().all(), sequence] { expect_right(tensors, sequence); });
    }
    gpu_.wait_until_idle();
    return sequences;
  }

  FakeGpu gpu_;
};

TEST_F(StagedClientTest, EveryBatchIsRightWhateverTheOrderOfCopiesAndTheBound) {
  for (const uint64_t staged_bytes_max : {0, 1, 20'000}) {
    gpu_.shuffle(draw<uint64_t>(0, 1'000'000));
    start_on_fake({.worker_count = 3, .prefetch_factor = 3}, staged_bytes_max);
    epoch_ = 0;
    begin_epoch(draw_batches(200));
    EXPECT_EQ(finish_epoch_on_device(), counting(200));
    TearDown();
  }
}

TEST_F(StagedClientTest, InFreeOrderEveryBatchComesOnceWithinASmallBound) {
  start_on_fake({.worker_count = 3, .overtaking_max = session::kAnyOrder}, 1);
  begin_epoch(draw_batches(200));
  auto sequences = finish_epoch_on_device();
  std::sort(sequences.begin(), sequences.end());
  EXPECT_EQ(sequences, counting(200));
}

TEST_F(StagedClientTest, EpochsThatWereLeftHalfwayLeaveNothingBehind) {
  start_on_fake({.worker_count = 2}, 10'000);
  for (int epoch = 0; epoch < 12; ++epoch) {
    begin_epoch(draw_batches(40));
    const int consumed_count = draw(0, 40);
    for (int count = 0; count < consumed_count; ++count) ASSERT_NE(next_batch(), nullptr);
  }
  begin_epoch(draw_batches(40));
  EXPECT_EQ(finish_epoch_on_device(), counting(40));
}

TEST_F(StagedClientTest, AClientThatIsDroppedInMidEpochWaitsForItsCopiesAlone) {
  start_on_fake({.worker_count = 2, .prefetch_factor = 4}, 0);
  gpu_.hold();
  begin_epoch(draw_batches(100));
  auto batch = next_batch();
  client_.reset();
  gpu_.let_go();
  gpu_.run_on_current([this, tensors = batch->tensors().all()] { expect_right(tensors, 0); });
  gpu_.wait_until_idle();
  batch.reset();
}

TEST_F(StagedClientTest, ADeviceThatIsLostInMidEpochIsAnErrorInPlaceOfEachBatchAndNoHang) {
  start_on_fake({.worker_count = 2, .prefetch_factor = 4}, 0);
  begin_epoch(draw_batches(100));
  for (int count = 0; count < 10; ++count) ASSERT_NE(next_batch(), nullptr);
  gpu_.hold();
  gpu_.lose();
  int error_count = 0;
  for (int count = 10; count < 100; ++count) {
    const Event event = next();
    if (event.kind == Event::Kind::kFailed) {  // a batch that was copied before
      submit();  // all that are outstanding may be such, and then nothing else is asked for
      ++error_count;
    } else if (event.kind == Event::Kind::kBatch && event.batch->record().remote_error()) {
      ++error_count;
    }
  }
  gpu_.let_go();
  EXPECT_EQ(error_count, 90);
}

TEST_F(StagedClientTest, AForkedChildLeavesTheStagesOfItsParentAlone) {
  start_on_fake({.worker_count = 2, .prefetch_factor = 4}, 10'000);
  begin_epoch(draw_batches(60));
  ASSERT_NE(next_batch(), nullptr);
  for (int round = 0; round < 10; ++round) {
    client_->retire_held();
    const pid_t child = ::fork();
    if (child == 0) {
      client_.reset();  // as Python does when the child drops the iterator that it inherited
      ::_exit(0);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ASSERT_NE(next_batch(), nullptr);
  }
  auto sequences = finish_epoch_on_device();
  EXPECT_EQ(sequences.size(), 49u);
}

}  // namespace
}  // namespace penstock::loader
