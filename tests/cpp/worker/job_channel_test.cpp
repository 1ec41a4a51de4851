// SPDX-License-Identifier: Apache-2.0
// The end of a job's process, with the test as its server.
#include "worker/job_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::worker {
namespace {

using server::PoolResult;
using std::chrono::minutes;
using std::chrono::steady_clock;
using wire::BlobId;
using wire::FromJob;
using wire::ToJob;
using Bytes = std::vector<std::byte>;

Bytes channel_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string format_blob(const Result<Bytes>& bytes) {
  if (!bytes) return std::string(errc_name(bytes.error().code)) + ": " + bytes.error().message;
  return {reinterpret_cast<const char*>(bytes.value().data()), bytes.value().size()};
}

BlobId channel_blob_id(uint8_t value) {
  BlobId id;
  id.fill(std::byte{value});
  return id;
}

constexpr wire::BatchKey kWorkKey{.epoch = 1, .sequence = 2};

class JobChannelTest : public testing::Test {
 protected:
  JobChannelTest() {
    auto ends = shm::Channel::open_pair().value();
    server_.emplace(std::move(ends.here));
    job_.emplace(std::move(ends.there));
  }

  static steady_clock::time_point soon() { return steady_clock::now() + minutes(1); }
  static steady_clock::time_point before() { return steady_clock::now() - minutes(1); }

  void say(const ToJob& message, std::span<const int> fds = {}) {
    const auto bytes = wire::write_to_job(message);
    const std::span<const std::byte> part(bytes);
    ASSERT_TRUE(server_->send({&part, 1}, fds));
  }
  void hand_work(wire::BatchKey key) { say({.kind = ToJob::Kind::kWork, .trainer_id = 5, .key = key}); }
  void begin_work() {
    hand_work(kWorkKey);
    const auto work = job_->next(soon());
    ASSERT_TRUE(work) << work.error().message;
    EXPECT_EQ(work.value()->trainer_id, 5u);
  }
  std::optional<uint64_t> next_sequence() {
    const auto work = job_->next(before());
    return work ? std::optional(work.value()->key.sequence) : std::nullopt;
  }
  // What the job has said next; nothing where there is nothing.
  std::optional<FromJob::Kind> heard() {
    const auto message = server_->receive(before());
    if (!message) return std::nullopt;
    const auto parsed = wire::parse_from_job(message.value().bytes);
    EXPECT_TRUE(parsed);
    return parsed ? std::optional(parsed.value().kind) : std::nullopt;
  }

  std::optional<shm::Channel> server_;
  std::optional<JobChannel> job_;
  const BlobId id_ = channel_blob_id(7);
  const Bytes blob_ = channel_bytes("a part of a job");
};

TEST_F(JobChannelTest, JobIsOverOnceTheServerHasHungUp) {
  EXPECT_EQ(job_->next(before()).error().code, Errc::kTimeout);
  server_.reset();
  EXPECT_EQ(job_->next(soon()).error().code, Errc::kClosed);
  EXPECT_FALSE(job_->is_wanted());
}

TEST_F(JobChannelTest, ServerOfAnotherVersionIsAMismatchThatNamesBoth) {
  auto bytes = wire::write_to_job({.kind = ToJob::Kind::kWork, .trainer_id = 5});
  const uint16_t version = wire::kJobVersion + 8;
  std::memcpy(bytes.data() + 4, &version, sizeof version);
  const std::span<const std::byte> part(bytes);
  ASSERT_TRUE(server_->send({&part, 1}));
  const auto work = job_->next(soon());
  ASSERT_FALSE(work);
  EXPECT_EQ(work.error().code, Errc::kMismatch);
  const std::string both =
      "has version " + std::to_string(version) + ", but this process uses version " + std::to_string(wire::kJobVersion);
  EXPECT_NE(work.error().message.find(both), std::string::npos) << work.error().message;
}

TEST_F(JobChannelTest, WorkIsWantedUntilTheServerSaysOtherwise) {
  begin_work();
  EXPECT_TRUE(job_->is_wanted());
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  EXPECT_FALSE(job_->is_wanted());
  say({.kind = ToJob::Kind::kWanted, .key = kWorkKey});
  EXPECT_TRUE(job_->is_wanted());
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  EXPECT_FALSE(job_->is_wanted());
  job_->finish({.kind = PoolResult::Kind::kGivenUp});
  EXPECT_EQ(heard(), FromJob::Kind::kGivenUp);
  begin_work();
  EXPECT_TRUE(job_->is_wanted());
}

TEST_F(JobChannelTest, WhatIsSaidOfWorkThatIsOverIsPassedOver) {
  begin_work();
  job_->finish({.answer = wire::AnswerKind::kEnd});
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  say({.kind = ToJob::Kind::kBlob, .blobs = {&id_, 1}, .body = blob_});
  begin_work();
  EXPECT_TRUE(job_->is_wanted());
}

TEST_F(JobChannelTest, WorkThatIsHandedAheadIsTakenInOrder) {
  begin_work();
  hand_work({.epoch = 1, .sequence = 3});
  EXPECT_TRUE(job_->is_wanted());  // which takes that in
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  EXPECT_FALSE(job_->is_wanted());
  job_->finish({.kind = PoolResult::Kind::kGivenUp});
  hand_work({.epoch = 1, .sequence = 4});
  EXPECT_EQ(next_sequence(), 3u);
  EXPECT_TRUE(job_->is_wanted());
  job_->finish({.answer = wire::AnswerKind::kEnd});
  EXPECT_EQ(next_sequence(), 4u);
}

TEST_F(JobChannelTest, WorkThatIsHandedAheadAndUnwantedIsGivenUpUnbegun) {
  begin_work();
  hand_work({.epoch = 1, .sequence = 3});
  EXPECT_TRUE(job_->is_wanted());
  say({.kind = ToJob::Kind::kUnwanted, .key = {.epoch = 1, .sequence = 3}});
  EXPECT_TRUE(job_->is_wanted());
  job_->finish({.answer = wire::AnswerKind::kEnd});
  EXPECT_EQ(next_sequence(), std::nullopt);
  EXPECT_EQ(heard(), FromJob::Kind::kResult);
  EXPECT_EQ(heard(), FromJob::Kind::kGivenUp);
  EXPECT_EQ(heard(), std::nullopt);
}

TEST_F(JobChannelTest, JobThatIsOverBeginsNothingThatWasHandedAhead) {
  begin_work();
  hand_work({.epoch = 1, .sequence = 3});
  EXPECT_TRUE(job_->is_wanted());
  server_.reset();
  EXPECT_EQ(job_->next(soon()).error().code, Errc::kClosed);
}

TEST_F(JobChannelTest, OneResultIsSentOfOnePieceOfWork) {
  begin_work();
  job_->finish({.answer = wire::AnswerKind::kEnd});
  job_->finish({.answer = wire::AnswerKind::kEnd});
  EXPECT_EQ(heard(), FromJob::Kind::kResult);
  EXPECT_EQ(heard(), std::nullopt);
}

TEST_F(JobChannelTest, PartOfAJobIsAskedForOnceAndComesEitherWay) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  EXPECT_EQ(heard(), FromJob::Kind::kBlobRequest);
  EXPECT_EQ(heard(), std::nullopt);
  say({.kind = ToJob::Kind::kBlob, .blobs = {&id_, 1}, .body = blob_});
  EXPECT_EQ(format_blob(job_->blob(id_, before())), "a part of a job");

  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  EXPECT_EQ(heard(), FromJob::Kind::kBlobRequest);
  const FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), blob_.data(), blob_.size()), static_cast<ssize_t>(blob_.size()));
  const int fd = file.get();
  say({.kind = ToJob::Kind::kBlobInFile, .blob_bytes = blob_.size(), .blobs = {&id_, 1}}, {&fd, 1});
  EXPECT_EQ(format_blob(job_->blob(id_, before())), "a part of a job");
}

// A wait is many short ones, and what comes between two of them, or is seen while somebody looks whether the batch is
// wanted, is not said again.
TEST_F(JobChannelTest, PartOfAJobThatComesBetweenTwoWaitsIsNotLost) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  say({.kind = ToJob::Kind::kWanted, .key = kWorkKey});
  say({.kind = ToJob::Kind::kBlob, .blobs = {&id_, 1}, .body = blob_});
  EXPECT_TRUE(job_->is_wanted());
  EXPECT_EQ(format_blob(job_->blob(id_, before())), "a part of a job");
}

TEST_F(JobChannelTest, PartOfAJobThatCannotBeHadIsItsFault) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  const auto text = channel_bytes("the trainer does not have it");
  say({.kind = ToJob::Kind::kNoBlob,
       .error = static_cast<uint8_t>(Errc::kUnsupported),
       .blobs = {&id_, 1},
       .body = text});
  EXPECT_EQ(format_blob(job_->blob(id_, before())), "unsupported: the trainer does not have it");
}

TEST_F(JobChannelTest, AnotherPartOfAJobIsPassedOver) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  const BlobId other = channel_blob_id(8);
  say({.kind = ToJob::Kind::kBlob, .blobs = {&other, 1}, .body = channel_bytes("of work before this")});
  say({.kind = ToJob::Kind::kBlob, .blobs = {&id_, 1}, .body = blob_});
  EXPECT_EQ(format_blob(job_->blob(id_, before())), "a part of a job");
}

TEST_F(JobChannelTest, PartOfAJobIsNotWaitedForWhenNobodyWantsTheBatch) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  say({.kind = ToJob::Kind::kUnwanted, .key = kWorkKey});
  EXPECT_EQ(job_->blob(id_, soon()).error().code, Errc::kClosed);
  server_.reset();
  EXPECT_EQ(job_->blob(id_, soon()).error().code, Errc::kClosed);
}

TEST_F(JobChannelTest, FileThatIsShorterThanTheServerSaysIsAFault) {
  begin_work();
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kTimeout);
  const FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC));
  const int fd = file.get();
  say({.kind = ToJob::Kind::kBlobInFile, .blob_bytes = 100, .blobs = {&id_, 1}}, {&fd, 1});
  EXPECT_EQ(job_->blob(id_, before()).error().code, Errc::kFailed);
}

}  // namespace
}  // namespace penstock::worker
