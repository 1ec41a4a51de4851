// SPDX-License-Identifier: Apache-2.0
// The client against a worker that does not keep to the protocol. The test plays the worker, on real sockets.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "../wire/record_samples.h"
#include "../wire/wrong_field.h"
#include "../worker/shared_tensor.h"
#include "loader/client.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::loader {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using wire::AnswerKind;
using wire::are_all;
using wire::FromJob;
using wire::kAllBits;
using wire::run_fields;
using wire::ToJob;
using wire::WrongField;
using Event = Client::Event;

// A worker that says whatever it is told to.
class OddWorker {
 public:
  explicit OddWorker(FileDescriptor channel) : channel_(std::move(channel)) { send({.kind = FromJob::Kind::kReady}); }

  // The message and, with it, the arena's file if it says so, and other files.
  void send(const FromJob& message, std::span<const int> files = {}) {
    send_bytes(wire::write_from_job(message), files);
  }
  void send_bytes(std::span<const std::byte> bytes, std::span<const int> files = {}) {
    constexpr size_t kPlacedAt = 10;
    constexpr std::byte kNewArena{4};
    const bool has_arena = bytes.size() >= wire::kFromJobHeadBytes && (bytes[kPlacedAt] & kNewArena) != std::byte{0};
    std::vector<int> fds(files.begin(), files.end());
    if (has_arena && arena_) fds.insert(fds.begin(), arena_->fd());
    EXPECT_TRUE(channel_.send({&bytes, 1}, fds));
  }

  // Makes an arena of two slabs, which the next batch passes.
  void make_arena(uint32_t arena_id = 0) {
    arena_ = shm::Arena::create({.slab_bytes = 1 << 16, .slab_count = 2}, arena_id).value();
    is_arena_new_ = true;
  }

  // Writes a batch of one tensor of eight bytes into a free slab and returns the message that names it.
  FromJob write_batch(uint64_t sequence, uint32_t epoch = 1) {
    return write_record(sequence, wire::make_record({wire::make_entry(4, {1})}, wire::nest_of_tensors(1)), epoch);
  }
  FromJob write_record(uint64_t sequence, const std::vector<std::byte>& record, uint32_t epoch = 1) {
    const uint32_t slab_index = arena_->try_acquire().value();
    EXPECT_TRUE(arena_->reserve(slab_index, arena_->slab_bytes()));
    std::memcpy(arena_->slab(slab_index), &sequence, sizeof sequence);
    std::memcpy(arena_->slab(slab_index) + 64, record.data(), record.size());
    return {.answer = AnswerKind::kBatch,
            .key = {.epoch = epoch, .sequence = sequence},
            .record_bytes = static_cast<uint32_t>(record.size()),
            .payload_bytes = 64 + record.size(),
            .place = wire::SlabPlace{.arena_id = arena_->id(),
                                     .slab_index = slab_index,
                                     .generation = arena_->generation(slab_index),
                                     .slab_bytes = arena_->slab_bytes()},
            .is_new_arena = std::exchange(is_arena_new_, false)};
  }

  shm::Arena& arena() { return *arena_; }
  shm::Channel& channel() { return channel_; }

 private:
  shm::Channel channel_;
  std::shared_ptr<shm::Arena> arena_;
  bool is_arena_new_ = false;
};

// A client that has asked its workers, of which there are one or two, for four batches.
struct ServedClient {
  // Where `send_error` is not 0, nothing can be sent to the first worker, for that reason of the system.
  explicit ServedClient(const ClientOptions& options = {.worker_count = 1, .prefetch_factor = 4}, int send_error = 0)
      : client(options) {
    int first_fd = -1;
    for (uint32_t worker_id = 0; worker_id < options.worker_count; ++worker_id) {
      const ChannelFds ends = client.open_channel(worker_id).value();
      if (worker_id == 0) first_fd = ends.trainer;
      auto& made = worker_id == 0 ? worker : other;
      made = std::make_unique<OddWorker>(FileDescriptor(::dup(ends.worker)));
      EXPECT_TRUE(client.note_started(worker_id, /*pid=*/0));
    }
    // The client's thread has the filter of the one that starts it, and the test's goes on without.
    std::thread([&] {
      if (send_error != 0) {
        EXPECT_TRUE(test::fail_sendmsg(first_fd, send_error));
      }
      EXPECT_TRUE(client.start());
    }).join();
    client.begin_epoch();
    for (int request = 0; request < 4; ++request) EXPECT_TRUE(client.submit({}));
  }

  Event next() {
    const auto deadline = steady_clock::now() + seconds(30);
    for (;;) {
      Event event = client.try_next();
      if (event.kind != Event::Kind::kNothing || steady_clock::now() > deadline) return event;
      client.wait_until(deadline);
    }
  }

  Client client;
  std::unique_ptr<OddWorker> worker;
  std::unique_ptr<OddWorker> other;  // where there are two
};

class OddWorkerTest : public testing::Test {
 protected:
  Event next() { return served_.next(); }
  void expect_failure(const std::string& words) {
    const Event event = next();
    EXPECT_EQ(event.kind, Event::Kind::kFailed);
    EXPECT_NE(event.message().find(words), std::string::npos) << event.message();
  }
  void expect_batch(uint64_t sequence) {
    const Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    EXPECT_EQ(event.batch->record().facts().sequence, sequence);
    EXPECT_EQ(*event.batch->tensors().all().at(0).const_data_ptr<int64_t>(), static_cast<int64_t>(sequence));
  }
  static FromJob batch_in(uint32_t arena_id, bool is_new_arena = false) {
    return {.answer = AnswerKind::kBatch,
            .key = {.epoch = 1},
            .record_bytes = 32,
            .payload_bytes = 96,
            .place = wire::SlabPlace{.arena_id = arena_id},
            .is_new_arena = is_new_arena};
  }
  // Whether the slab is back with the worker. A message that follows on the same socket has been read by then.
  void expect_released(uint32_t slab_index) {
    worker_->arena().wait_for_release(seconds(30));
    EXPECT_EQ(worker_->arena().try_acquire(), slab_index);
  }

  ServedClient served_;
  Client& client_ = served_.client;
  const std::unique_ptr<OddWorker>& worker_ = served_.worker;
};

TEST_F(OddWorkerTest, OneThatKeepsToTheProtocolIsServed) {
  worker_->make_arena();
  worker_->send(worker_->write_batch(0));
  worker_->send(worker_->write_batch(1));
  expect_batch(0);
  expect_batch(1);
}

TEST_F(OddWorkerTest, BytesThatAreNoAnswerAreAFailureWithAReason) {
  worker_->send_bytes(std::vector<std::byte>(10));
  expect_failure("10 bytes long");
  worker_->send_bytes(std::vector<std::byte>(wire::kFromJobHeadBytes));
  expect_failure("its magic number is wrong");
}

TEST_F(OddWorkerTest, WhatOnlyTheProcessOfAJobSaysIsAFailure) {
  const FromJob messages[] = {
      {.kind = FromJob::Kind::kGivenUp}, {.kind = FromJob::Kind::kDeclined}, {.kind = FromJob::Kind::kBlobRequest}};
  for (const FromJob& message : messages) {
    worker_->send(message);
    expect_failure("only a job process");
  }
  worker_->send({.answer = AnswerKind::kError, .key = {.epoch = 1}});
  expect_failure("must be a batch that raises");
}

TEST_F(OddWorkerTest, WorkerThatBeginsTwiceIsAFailure) {
  worker_->send({.kind = FromJob::Kind::kReady});
  expect_failure("it started twice");
}

TEST_F(OddWorkerTest, FilesWithoutABatchAreAFailure) {
  const int file = STDOUT_FILENO;
  worker_->send({.answer = AnswerKind::kEnd, .key = {.epoch = 1}}, {&file, 1});
  expect_failure("a message that mentions no files has files attached");
}

TEST_F(OddWorkerTest, StateBesideABatchIsAFailure) {
  worker_->make_arena();
  auto message = worker_->write_batch(0);
  const std::vector<std::byte> state(5);
  message.state = state;
  worker_->send(message);
  expect_failure("the state of its dataset must be sent in a batch");
}

TEST_F(OddWorkerTest, ASlabThatIsNotThereIsAFailure) {
  worker_->make_arena();
  auto message = worker_->write_batch(0);
  message.place->slab_index = 2;
  worker_->send(message);
  expect_failure("slab 2 of 2");
}

TEST_F(OddWorkerTest, ARecordOutsideItsSlabIsAFailureAndTheSlabGoesBack) {
  worker_->make_arena();
  auto message = worker_->write_batch(0);
  for (const uint64_t offset : {uint64_t{1 << 16}, uint64_t{1} << 33, uint64_t{1 << 16} - 8}) {
    message.payload_bytes = offset + message.record_bytes;
    worker_->send(message);
    message.is_new_arena = false;
    expect_failure("outside its slab");
  }
  expect_released(0);
}

TEST_F(OddWorkerTest, APayloadThatReachesIntoTheRecordIsAFailure) {
  worker_->make_arena();
  auto message = worker_->write_batch(0);
  std::memmove(worker_->arena().slab(0), worker_->arena().slab(0) + 64, message.record_bytes);
  message.payload_bytes = message.record_bytes;
  worker_->send(message);
  expect_failure("64 payload bytes but 0 were received");
}

TEST_F(OddWorkerTest, ARecordThatIsDamagedIsAFailureAndTheSlabGoesBack) {
  worker_->make_arena();
  const auto message = worker_->write_batch(0);
  worker_->arena().slab(0)[64] ^= std::byte{1};
  worker_->send(message);
  expect_failure("PNF1");
  expect_released(0);
}

TEST_F(OddWorkerTest, InlineBatchHasItsPayloadAndThenItsRecord) {
  const auto record = wire::make_record({wire::make_entry(4, {1})}, wire::nest_of_tensors(1));
  const uint64_t value = 42;
  std::vector<std::byte> body(64);
  std::memcpy(body.data(), &value, sizeof value);
  body.insert(body.end(), record.begin(), record.end());
  FromJob message{.answer = AnswerKind::kBatch,
                  .key = {.epoch = 1},
                  .record_bytes = static_cast<uint32_t>(record.size()),
                  .payload_bytes = body.size() + 1};
  const auto bytes = [&] {
    auto bytes = wire::write_from_job(message);
    bytes.insert(bytes.end(), body.begin(), body.end());
    return bytes;
  };
  worker_->send_bytes(bytes());
  expect_failure("the length of its batch does not match its header");
  message.payload_bytes = body.size();
  worker_->send_bytes(bytes());
  const Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  EXPECT_EQ(*event.batch->tensors().all().at(0).const_data_ptr<int64_t>(), 42);
}

TEST_F(OddWorkerTest, AnArenaThatIsNotSealedIsAFailure) {
  const int file = STDOUT_FILENO;
  worker_->send(batch_in(0, /*is_new_arena=*/true), {&file, 1});
  expect_failure("not sealed");
}

TEST_F(OddWorkerTest, NewArenaWithoutItsFileIsAFailure) {
  worker_->send(batch_in(0, /*is_new_arena=*/true));
  expect_failure("without its file descriptor");
}

TEST_F(OddWorkerTest, ArenaThatWasNotPassedIsAFailure) {
  worker_->send(batch_in(5));
  expect_failure("arena 5, which it has not passed");
}

TEST_F(OddWorkerTest, FilesThatWerePassedGoToTheBatchesThatReferToThem) {
  const at::Tensor first = worker::in_shared_memory(100);
  const at::Tensor second = worker::in_shared_memory(200);
  const int files[] = {worker::file_of(first), worker::file_of(second)};
  worker_->make_arena();
  worker_->send(worker_->write_record(0, wire::make_record({wire::shared_entry(0, 0)}, wire::nest_of_tensors(1))),
                {&files[0], 1});
  worker_->send(worker_->write_record(1, wire::make_record({wire::shared_entry(0, 600)}, wire::nest_of_tensors(1))),
                {&files[1], 1});
  EXPECT_TRUE(next().batch->tensors().all().at(0).equal(first.slice(0, 0, 3)));
  EXPECT_TRUE(next().batch->tensors().all().at(0).equal(second.slice(0, 150, 153)));
}

TEST_F(OddWorkerTest, ABatchInAFileThatIsTooShortIsAFailure) {
  worker_->make_arena();
  const at::Tensor tensor = worker::in_shared_memory(2);
  const int file = worker::file_of(tensor);
  worker_->send(worker_->write_record(0, wire::make_record({wire::shared_entry(0, 0)}, wire::nest_of_tensors(1))),
                {&file, 1});
  expect_failure("beyond the end of its file");
}

TEST_F(OddWorkerTest, BatchWithMoreOrFewerFilesThanItRefersToIsAFailure) {
  worker_->make_arena();
  const int file = STDOUT_FILENO;
  worker_->send(worker_->write_record(0, wire::make_record({wire::shared_entry(0, 0)}, wire::nest_of_tensors(1))));
  expect_failure("passed 0 files with a batch whose tensors lie in 1");
  worker_->send(worker_->write_batch(0), {&file, 1});
  expect_failure("passed 1 files with a batch whose tensors lie in 0");
}

TEST_F(OddWorkerTest, BytesThatAreNoMessageEndTheChannelWithAReason) {
  const std::vector<std::byte> bytes(sizeof(shm::MessageHead));
  ASSERT_EQ(::send(worker_->channel().fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  expect_failure("PNM1");
  for (auto message = worker_->channel().receive(steady_clock::now() + seconds(30)); message;
       message = worker_->channel().receive(steady_clock::now() + seconds(30))) {
  }  // the requests
  EXPECT_EQ(worker_->channel().receive(steady_clock::now() + seconds(30)).error().code, Errc::kClosed);
}

ClientOptions two_workers() {
  return {.worker_count = 2, .prefetch_factor = 4, .overtaking_max = session::kAnyOrder, .any_worker = true};
}

// The first of two workers is used no more, and the other one makes all four batches.
void expect_other_makes_all(ServedClient& served, const std::string& words) {
  const Event news = served.next();
  EXPECT_EQ(news.kind, Event::Kind::kNews);
  EXPECT_NE(news.message().find(words), std::string::npos) << news.message();
  const Event gone = served.next();
  EXPECT_EQ(gone.kind, Event::Kind::kWorkerGone);
  EXPECT_EQ(gone.worker_id, 0u);
  served.other->make_arena();
  std::set<uint64_t> made;
  while (made.size() < 4) {
    const auto message = served.other->channel().receive(steady_clock::now() + seconds(30));
    ASSERT_TRUE(message) << message.error().message;
    const auto request = wire::parse_to_job(message.value().bytes);
    ASSERT_TRUE(request) << request.error().message;
    if (request.value().kind != ToJob::Kind::kWork) continue;
    served.other->send(served.other->write_batch(request.value().key.sequence));
    const Event event = served.next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    EXPECT_TRUE(made.insert(event.batch->record().facts().sequence).second);
  }
}

// Its batches were waited for until the loader's timeout, and without one for ever.
TEST(OddWorkers, OthersMakeWhatOneOwesWhoseChannelFails) {
  ServedClient served(two_workers());
  const std::vector<std::byte> bytes(sizeof(shm::MessageHead));
  ASSERT_EQ(::send(served.worker->channel().fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  expect_other_makes_all(served, "PNM1");
}

// So were those that it could not be asked for.
TEST(OddWorkers, OthersMakeWhatOneCannotBeAskedFor) {
  ServedClient served(two_workers(), ENOBUFS);
  expect_other_makes_all(served, "worker 0: sending to the peer failed");
}

// One message that was wrong ended the training, although the others could make the batches.
TEST(OddWorkers, OthersMakeWhatOneOwesThatSpeaksWrongly) {
  ServedClient served(two_workers());
  served.worker->send_bytes(std::vector<std::byte>(10));
  expect_other_makes_all(served, "10 bytes long");
}

TEST(OddWorkers, OthersMakeWhatOneOwesWhoseBatchCannotBeRead) {
  ServedClient served(two_workers());
  served.worker->make_arena();
  auto message = served.worker->write_batch(0);
  served.worker->arena().slab(0)[64] ^= std::byte{1};
  served.worker->send(message);
  expect_other_makes_all(served, "PNF1");
}

TEST(OddWorkers, OthersMakeWhatOneOwesThatEndsADatasetWithoutShards) {
  ServedClient served(two_workers());
  served.worker->send({.answer = AnswerKind::kEnd, .key = {.epoch = 1}});
  expect_other_makes_all(served, "a dataset without shards ended");
}

TEST(OddWorkers, LastOneThatSpeaksWronglyIsAFailure) {
  ServedClient served(two_workers());
  served.worker->send_bytes(std::vector<std::byte>(10));
  EXPECT_EQ(served.next().kind, Event::Kind::kNews);
  EXPECT_EQ(served.next().kind, Event::Kind::kWorkerGone);
  served.other->send_bytes(std::vector<std::byte>(11));
  const Event failed = served.next();
  EXPECT_EQ(failed.kind, Event::Kind::kFailed);
  EXPECT_NE(failed.message().find("11 bytes long"), std::string::npos) << failed.message();
  EXPECT_EQ(served.next().kind, Event::Kind::kWorkerLost);
}

TEST_F(OddWorkerTest, AnswersOfAnEarlierEpochAreDroppedAndTheirSlabsGoBack) {
  worker_->make_arena();
  client_.begin_epoch();
  EXPECT_TRUE(client_.submit({}));
  const auto stale = worker_->write_batch(0, /*epoch=*/1);
  const auto fresh = worker_->write_batch(0, /*epoch=*/2);
  worker_->send(stale);
  worker_->send(fresh);
  const Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  EXPECT_EQ(event.batch->record().facts().epoch, 2u);
  EXPECT_EQ(client_.counters().stale_batches.value(), 1u);
  EXPECT_EQ(worker_->arena().try_acquire(), 0u) << "the slab of the dropped batch";
}

// They wait in the channel, and in the client beyond that.
TEST_F(OddWorkerTest, RequestsToAWorkerThatDoesNotReadComeInTheirOrder) {
  const std::vector<std::byte> large(100'000);
  for (int count = 0; count < 50; ++count) client_.broadcast(ToJob::Kind::kPrefix, large);
  uint64_t next_sequence = 0;
  int prefix_count = 0;
  while (prefix_count < 50) {
    const auto message = worker_->channel().receive(steady_clock::now() + seconds(30));
    ASSERT_TRUE(message) << message.error().message;
    const auto request = wire::parse_to_job(message.value().bytes);
    ASSERT_TRUE(request) << request.error().message;
    if (request.value().kind == ToJob::Kind::kWork) {
      EXPECT_EQ(request.value().key.sequence, next_sequence++);
      EXPECT_EQ(prefix_count, 0) << "they were asked for before";
    } else {
      EXPECT_EQ(message.value().bytes.size(), wire::kToJobHeadBytes + large.size());
      ++prefix_count;
    }
  }
  EXPECT_EQ(next_sequence, 4u);
}

TEST_F(OddWorkerTest, WhatALostWorkerHadSentComesBeforeTheNewsOfItsLoss) {
  worker_->make_arena();
  worker_->send(worker_->write_batch(0));
  worker_->send(worker_->write_batch(1));
  worker_->channel().shut_down();
  expect_batch(0);
  expect_batch(1);
  EXPECT_EQ(next().kind, Event::Kind::kWorkerLost);
}

TEST_F(OddWorkerTest, ABatchThatWasNotAskedForIsAFailure) {
  worker_->make_arena();
  worker_->send(worker_->write_batch(99));
  expect_failure("worker 0 answered batch 99 of epoch 1, which was not requested from it");
}

TEST_F(OddWorkerTest, ABatchThatComesTwiceIsAFailure) {
  worker_->make_arena();
  worker_->send(worker_->write_batch(0));
  expect_batch(0);
  worker_->send(worker_->write_batch(0));
  expect_failure("or was already answered");
}

// ---- Answers that are right but for one field

constexpr WrongField kAnswerFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: ready", 6, 1, 5},
    {"kind: states", 6, 1, 6},
    {"kind: unknown", 6, 1, 99},
    {"answer: none", 7, 1, 0},
    {"answer: end", 7, 1, 2},
    {"answer: error", 7, 1, 3},
    {"answer: unknown", 7, 1, 99},
    {"flags: raises", 8, 1, wire::kBatchRaises},
    {"flags: has state", 8, 1, wire::kBatchHasState},
    {"flags: unknown", 8, 1, 0x80},
    {"time on CPUs", 9, 1, kAllBits},
    {"placed: nowhere", 10, 1, 0},
    {"placed: no new arena", 10, 1, 1},
    {"placed: transient", 10, 1, 7},
    {"placed: unknown", 10, 1, 0x85},
    {"reserved", 11, 1, 1},
    {"record bytes: none", 12, 4, 0},
    {"record bytes: all", 12, 4, kAllBits},
    {"payload bytes: none", 16, 8, 0},
    {"payload bytes: one more", 16, 8, 64 + 1},
    {"payload bytes: many", 16, 8, uint64_t{1} << 33},
    {"payload bytes: all", 16, 8, kAllBits},
    {"fetch time", 24, 4, kAllBits},
    {"prefix time", 28, 4, kAllBits},
    {"dataset time", 32, 4, kAllBits},
    {"slowest place", 36, 2, kAllBits},
    {"slowest share", 38, 2, kAllBits},
    {"samples", 40, 4, kAllBits},
    {"arena id", 44, 4, 99},
    {"dataset size", 48, 8, 99},
    {"slab index", 56, 4, kAllBits},
    {"slab generation", 60, 4, kAllBits},
    {"slab bytes", 64, 8, kAllBits},
    {"state bytes", 72, 8, kAllBits},
    {"text bytes", 80, 4, kAllBits},
    {"epoch", 84, 4, 99},
    {"sequence", 88, 8, 99},
};
static_assert(are_all(kAnswerFields, wire::kFromJobHeadBytes), "a field of an answer has no case");

// The batch, or what says that none came: never an assertion, and never a batch that is taken for another.
TEST(OddAnswers, AreABatchOrAFailure) {
  run_fields(kAnswerFields, [](const WrongField& field) {
    ServedClient served;
    served.worker->make_arena();
    auto bytes = wire::write_from_job(served.worker->write_batch(0));
    write_field(bytes, field);
    served.worker->send_bytes(bytes);
    served.worker->channel().shut_down();
    const Event event = served.next();
    if (event.kind == Event::Kind::kBatch) {
      EXPECT_EQ(event.batch->record().facts().sequence, 0u);
      EXPECT_EQ(*event.batch->tensors().all().at(0).const_data_ptr<int64_t>(), 0);
    } else {
      EXPECT_TRUE(event.kind == Event::Kind::kFailed || event.kind == Event::Kind::kWorkerLost ||
                  event.kind == Event::Kind::kShardEnded)
          << static_cast<int>(event.kind);
    }
  });
}

}  // namespace
}  // namespace penstock::loader
