// SPDX-License-Identifier: Apache-2.0
// The stream when a process dies or forks.
#include <sys/prctl.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../base/child_process.h"
#include "loader/client.h"
#include "stream_fixture.h"

namespace penstock::loader {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

class ClientFailureTest : public StreamTest {
 protected:
  // Streams `count` batches and drops them.
  void stream(size_t count) {
    for (size_t taken = 0; taken < count; ++taken) {
      const auto batch = next_batch();
      ASSERT_NE(batch, nullptr);
      expect_right(*batch);
    }
  }

  // The difference between tensors and the batch that they must be, for the report of a child.
  std::string difference(const std::vector<at::Tensor>& tensors, uint64_t sequence) {
    const auto expected = test::make_batch(epoch_, sequence, batches_[sequence], make_tensor_on_heap);
    for (size_t index = 0; index < expected.size(); ++index) {
      if (!is_same(tensors[index], expected[index])) {
        return "batch " + std::to_string(sequence) + " tensor " + std::to_string(index) + " differs";
      }
    }
    return "";
  }
};

// A killed worker once took along what ZeroMQ's thread in it had not written yet.
TEST_F(ClientFailureTest, BatchesThatAKilledWorkerHadFinishedComeBeforeItsLoss) {
  for (int round = 0; round < 20; ++round) {
    start({.worker_count = 1, .prefetch_factor = 4});
    epoch_ = 0;
    begin_epoch({{1}, {2}, {3}, {test::kDie}});
    stream(3);
    const Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kWorkerLost);
    EXPECT_EQ(event.worker_id, 0u);
    expect_worker_ends(0, "signal 9");
    TearDown();
  }
}

// The trainer waited for ever: the worker's end of the connection was not closed.
TEST_F(ClientFailureTest, WorkerIsLostWhoseChildLivesOn) {
  start({.worker_count = 2, .prefetch_factor = 2});
  begin_epoch({{1}, {2}, {3}});
  stream(3);
  batches_.push_back({test::kDieWithAChild});  // once nothing of the other is under way
  submit();
  const Event event = next();
  EXPECT_EQ(event.kind, Event::Kind::kWorkerLost);
  EXPECT_EQ(event.worker_id, 1u);
  expect_worker_ends(1, "signal 9");
}

TEST_F(ClientFailureTest, WorkerThatEndedBeforeTheClientStartsIsLost) {
  options_ = {.worker_count = 1};
  client_ = std::make_shared<Client>(options_);
  const FileDescriptor held(::dup(client_->open_channel(0).value().worker));  // so that the channel does not end
  const pid_t pid = test::spawn_program("stream_worker_main", {});            // without its arguments it ends at once
  ASSERT_GT(pid, 0);
  EXPECT_EQ(test::how_it_ended(test::wait_for_exit(pid, seconds(10))), "exit 64");
  ASSERT_TRUE(client_->note_started(0, pid)) << "whose number is no process's any more";
  ASSERT_TRUE(client_->start());
  begin_epoch({{1}});
  EXPECT_EQ(next().kind, Event::Kind::kWorkerLost);
}

TEST_F(ClientFailureTest, AWorkerThatIsKilledInItsDatasetIsLost) {
  start({.worker_count = 2});
  begin_epoch({{1}, {test::kStall}, {2}, {3}});
  stream(3);
  ::kill(worker_pids_[1], SIGKILL);
  const Event event = next();
  EXPECT_EQ(event.kind, Event::Kind::kWorkerLost);
  EXPECT_EQ(event.worker_id, 1u);
  expect_worker_ends(1, "signal 9");
}

TEST_F(ClientFailureTest, BatchesOfTheWorkersThatLiveStayGoodAfterTheLoss) {
  start({.worker_count = 2, .prefetch_factor = 1});
  begin_epoch({{5}, {6}, {7}, {test::kDie}});
  const auto tensors = next_batch()->tensors().all();
  stream(1);
  Event event = next();
  if (event.kind == Event::Kind::kBatch) event = next();  // the third may come before the news or never
  EXPECT_EQ(event.kind, Event::Kind::kWorkerLost);
  expect_right(tensors, 0);
  expect_worker_ends(1, "signal 9");
}

TEST_F(ClientFailureTest, HangingUpEndsIdleWorkersWithStatusZero) {
  start({.worker_count = 2});
  begin_epoch(draw_batches(30));
  finish_epoch();
  client_->stop();
  expect_workers_end("exit 0");
}

TEST_F(ClientFailureTest, HangingUpInTheMiddleOfAnEpochEndsWorkersWithStatusZero) {
  start({.worker_count = 2});
  begin_epoch(draw_batches(100));
  stream(10);
  client_.reset();
  expect_workers_end("exit 0");
}

TEST_F(ClientFailureTest, AWorkerThatWaitsForASlabLeavesWhenTheTrainerHangsUp) {
  start({.worker_count = 1, .prefetch_factor = 8});
  begin_epoch(std::vector<Indices>(40, Indices{1}));
  std::vector<std::unique_ptr<Batch>> held;
  for (int count = 0; count < 4; ++count) held.push_back(next_batch());
  client_.reset();
  expect_workers_end("exit 0");
}

// The process ids that a trainer's process writes when its workers are where the test wants them.
std::vector<pid_t> read_worker_pids(int fd) {
  std::string text;
  char bytes[64];
  for (ssize_t count = 0;
       std::count(text.begin(), text.end(), '\n') < 2 && (count = ::read(fd, bytes, sizeof bytes)) > 0;) {
    text.append(bytes, static_cast<size_t>(count));
  }
  int first = -1;
  int second = -1;
  if (std::sscanf(text.c_str(), "%d\n%d", &first, &second) != 2) return {};
  return {first, second};
}

// They need 2 s at most where their processors are not busy with something else.
constexpr seconds kExit{20};

TEST_F(ClientFailureTest, WorkersEndWhenTheirTrainerIsKilledEvenOneStuckInItsDataset) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // the workers become this process's children
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const FileDescriptor reading(ends[0]);
  FileDescriptor writing(ends[1]);
  const pid_t trainer = test::spawn_program("stream_trainer_main", {}, writing.get());
  ASSERT_GT(trainer, 0);
  writing.reset();
  const auto workers = read_worker_pids(reading.get());
  ASSERT_EQ(workers.size(), 2u) << test::how_it_ended(test::wait_for_exit(trainer, seconds(10)));
  const auto killed_at = steady_clock::now();
  ::kill(trainer, SIGKILL);
  EXPECT_EQ(test::how_it_ended(test::wait_for_exit(trainer, seconds(10))), "signal 9");
  for (const pid_t worker : workers) {
    const auto patience = std::chrono::duration_cast<milliseconds>(killed_at + kExit - steady_clock::now());
    const auto status = test::wait_for_exit(worker, std::max(patience, milliseconds(0)));
    EXPECT_NE(test::how_it_ended(status), "still running") << (worker == workers[0] ? "the stuck one" : "the idle one");
    if (!status) ::kill(worker, SIGKILL);
  }
}

TEST_F(ClientFailureTest, AForkedChildThatDropsItsCopiesDoesNotReleaseTheParentsSlabs) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(60));
  auto held = next_batch()->tensors().all();
  EXPECT_EQ(test::in_child([&]() -> std::string {
              held.clear();
              return "";
            }),
            "");
  stream(50);
  expect_right(held, 0);
}

TEST_F(ClientFailureTest, WhatAForkedChildHoldsStaysAsItWasWhenTheParentDropsItAndStreamsOn) {
  start({.worker_count = 2});
  begin_epoch(draw_batches(120));
  std::vector<std::vector<at::Tensor>> held;
  for (int count = 0; count < 4; ++count) held.push_back(next_batch()->tensors().all());
  client_->retire_held();
  test::Gate streamed;
  test::ChildProcess child([&]() -> std::string {
    streamed.pass();
    for (size_t sequence = 0; sequence < held.size(); ++sequence) {
      if (const auto found = difference(held[sequence], sequence); !found.empty()) return found;
    }
    return "";
  });
  held.clear();
  stream(100);
  streamed.open();
  EXPECT_EQ(child.join(), "");
}

TEST_F(ClientFailureTest, ForkingAgainAndAgainWithHeldBatchesNeverStallsTheStream) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(100));
  std::vector<std::vector<at::Tensor>> held;
  for (uint64_t sequence = 0; sequence < 100; ++sequence) {
    held.push_back(next_batch()->tensors().all());
    if (sequence % 5 == 4) client_->retire_held();
  }
  for (size_t sequence = 0; sequence < held.size(); ++sequence) expect_right(held[sequence], sequence);
}

TEST_F(ClientFailureTest, AClientInAForkedChildIsInertAndTheParentStreamsOn) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(40));
  stream(5);
  EXPECT_EQ(test::in_child([&]() -> std::string {
              client_->stop();
              client_.reset();
              return "";
            }),
            "");
  EXPECT_EQ(finish_epoch().size(), 35u);
}

TEST_F(ClientFailureTest, WhenOpenFilesRunOutTheClientFailsWithAReasonAndStops) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              std::string heard;
              for (int room = 0; room <= 24; ++room) {
                test::leave_descriptors(room);
                Client client({.worker_count = 4});
                Result<void> outcome;
                for (uint32_t worker_id = 0; outcome && worker_id < 4; ++worker_id) {
                  const auto opened = client.open_channel(worker_id);
                  outcome = opened ? client.note_started(worker_id, ::getpid()) : opened.error();
                }
                if (outcome) outcome = client.start();
                client.stop();
                if (!outcome && outcome.error().message.find("ulimit -n") == std::string::npos)
                  return outcome.error().message;
                heard += outcome ? '+' : '-';
              }
              const bool is_a_step = heard.front() == '-' && heard.back() == '+';
              return is_a_step && heard.find("+-") == std::string::npos ? "" : heard;
            }),
            "");
}

TEST_F(ClientFailureTest, StoppingTwiceIsAsStoppingOnce) {
  start({.worker_count = 1});
  begin_epoch({{1}});
  stream(1);
  client_->stop();
  client_->stop();
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
}

}  // namespace
}  // namespace penstock::loader
