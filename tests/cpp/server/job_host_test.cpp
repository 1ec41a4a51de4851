// SPDX-License-Identifier: Apache-2.0
// Against the processes of warm_main.cpp.
#include "server/job_host.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "warm_jobs.h"

namespace penstock::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::steady_clock;
using wire::AnswerKind;
using wire::BlobId;
using Kind = PoolResult::Kind;

constexpr size_t kMiB = size_t{1} << 20;

std::string all_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

class JobHostTest : public testing::Test {
 protected:
  void start(const std::string& word = "forks", const JobHostOptions& options = {}) {
    auto warm = WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/warm_main", word});
    ASSERT_TRUE(warm) << warm.error().message;
    const auto facts = warm.value()->wait_until_ready(steady_clock::now() + minutes(1));
    ASSERT_TRUE(facts) << facts.error().message;
    warm_pid_ = warm.value()->pid();
    hub_.emplace(std::move(warm).value());
    seat_.emplace(*hub_);
    host_.emplace(*seat_, "penstock worker of tests", options);
    host_->set_waker(waker_);
    host_->set_standing({.trainer_id = 1});
  }

  // ---- What the I/O thread does: it takes turns, and sleeps until there is a reason for the next one.

  void take_turn() {
    waker_.begin_turn();
    auto asked = host_->take_needs();
    if (asked.result) {
      EXPECT_FALSE(result_) << "two results of one piece of work";
      result_ = std::move(asked.result);
    }
    has_lost_process_ = has_lost_process_ || asked.lost_process_of != 0;
    if (asked.failure) failure_ = asked.failure;
    wants_work_ = asked.wants_work;
    if (wants_work_ && offered_) host_->offer(std::exchange(offered_, nullptr));
    requested_blob_ = asked.blob;
    if (const auto blob = requested_blob_ ? blobs_.find(*requested_blob_) : blobs_.end(); blob != blobs_.end()) {
      host_->give_blob(blob->first, std::move(blob->second));
      blobs_.erase(blob);
    }
  }
  void sleep_until(Instant deadline) {
    const bool may_sleep = waker_.begin_sleep();
    std::vector<pollfd> items{{.fd = waker_.fd(), .events = POLLIN, .revents = 0}};
    for (const int fd : host_->fds()) items.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    const auto time = wait_time(earlier(deadline, host_->due_at()), clock_now());
    ::poll(items.data(), items.size(), may_sleep ? static_cast<int>(time.count()) : 0);
    waker_.end_sleep(items.front().revents != 0);
    std::vector<int> readable;
    for (size_t place = 1; place < items.size(); ++place)
      if (items[place].revents != 0) readable.push_back(items[place].fd);
    host_->note_readable(readable);
  }
  // Until the process in use has said something, which is not read yet.
  void wait_for_its_word() const {
    pollfd item{.fd = host_->fds().back(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&item, 1, static_cast<int>(milliseconds(minutes(1)).count())), 1);
  }
  // False at the deadline.
  [[nodiscard]] bool until(const std::function<bool()>& is_there) {
    const Instant deadline = clock_now() + minutes(1);
    for (;;) {
      take_turn();
      if (is_there()) return true;
      if (clock_now() >= deadline) return false;
      sleep_until(deadline);
    }
  }

  // ---- Work, whose state says what the process does with it

  void offer(const std::string& word, uint64_t trainer_id = 1, std::vector<BlobId> blobs = {}) {
    result_.reset();
    offered_ = std::make_shared<const PoolWork>(PoolWork{.trainer_id = trainer_id,
                                                         .tenancy = 2,
                                                         .key = {.epoch = 3, .sequence = 4},
                                                         .lane = 5,
                                                         .is_lane_start = true,
                                                         .index_kind = wire::IndexKind::kPickle,
                                                         .epoch_seed = 6,
                                                         .first_place = 7,
                                                         .link_bytes_per_s = 8,
                                                         .indices = to_bytes("[1,2]"),
                                                         .seeds = to_bytes("(9,10)"),
                                                         .state = to_bytes(word),
                                                         .blobs = std::move(blobs)});
  }
  // Has a process make `word`, and hands it `next` ahead.
  void begin_with_ahead(const std::string& word, const std::string& next) {
    pid_ = pid_of(1);
    ASSERT_TRUE(until([&] { return !host_->due_at(); })) << "its start was told";
    offer(word);
    ASSERT_TRUE(until([&] { return !offered_; }));
    ASSERT_TRUE(host_->wants_ahead());
    ahead_ = std::make_shared<const PoolWork>(
        PoolWork{.trainer_id = 1, .tenancy = 2, .key = {.epoch = 3, .sequence = 5}, .state = to_bytes(next)});
    host_->send_ahead(ahead_);
    EXPECT_FALSE(host_->wants_ahead());
  }
  void let_it_go_on() { ASSERT_EQ(::kill(pid_, SIGUSR1), 0); }
  PoolResult result_of_ahead() {
    EXPECT_TRUE(until([&] { return wants_work_; }));
    EXPECT_FALSE(result_) << "work that was not offered yet has a result";
    host_->offer(std::exchange(ahead_, nullptr));
    return result();
  }
  PoolResult result() {
    EXPECT_TRUE(until([&] { return result_.has_value(); })) << "no result came";
    PoolResult result{.kind = Kind::kHandedBack};
    if (result_) result = *std::move(result_);
    result_.reset();
    return result;
  }
  PoolResult made(const std::string& word, uint64_t trainer_id = 1, std::vector<BlobId> blobs = {}) {
    offer(word, trainer_id, std::move(blobs));
    return result();
  }
  std::string told(const std::string& word, uint64_t trainer_id = 1, std::vector<BlobId> blobs = {}) {
    const auto result = made(word, trainer_id, std::move(blobs));
    EXPECT_EQ(result.kind, Kind::kAnswer) << result.text;
    EXPECT_EQ(result.answer, AnswerKind::kError);
    return result.text;
  }
  pid_t pid_of(uint64_t trainer_id) { return std::stoi(told("pid", trainer_id)); }

  // That the process has died of the work, and that another one makes the next batch.
  void expect_death(const std::string& word, const std::string& text, std::vector<BlobId> blobs = {}) {
    SCOPED_TRACE(word);
    has_lost_process_ = false;
    const auto result = made(word, 1, std::move(blobs));
    EXPECT_EQ(result.kind, Kind::kDied) << result.text;
    EXPECT_NE(result.text.find(text), std::string::npos) << result.text;
    EXPECT_FALSE(result.batch);
    EXPECT_TRUE(until([&] { return wants_work_; }));
    EXPECT_FALSE(has_lost_process_) << "it is told twice";
    EXPECT_FALSE(failure_) << failure_->message;
    const std::string notices = all_of(host_->take_notices());
    EXPECT_NE(notices.find(text), std::string::npos) << notices;
    EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  }
  // That the process has ended while it had no work.
  void expect_lost() {
    EXPECT_TRUE(until([&] { return std::exchange(has_lost_process_, false); }));
    EXPECT_TRUE(until([&] { return wants_work_; }));
    EXPECT_FALSE(result_);
    EXPECT_FALSE(failure_);
  }

  static bool is_gone(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }
  // Without a turn of the host: until the warm process has told its end.
  bool wait_until_gone(pid_t pid) const {
    pollfd item{.fd = host_->fds().front(), .events = POLLIN, .revents = 0};
    return ::poll(&item, 1, static_cast<int>(milliseconds(minutes(1)).count())) == 1 && is_gone(pid);
  }

  Waker waker_;
  pid_t warm_pid_ = 0;
  std::optional<WarmHub> hub_;
  std::optional<WarmSeat> seat_;
  std::optional<JobHost> host_;
  std::shared_ptr<const PoolWork> offered_;                 // shared with the host, once it wants work
  std::shared_ptr<const PoolWork> ahead_;                   // shared with the host
  pid_t pid_ = 0;                                           // of the process that has work ahead
  std::map<BlobId, Result<std::vector<std::byte>>> blobs_;  // each given once
  std::optional<PoolResult> result_;
  std::optional<BlobId> requested_blob_;
  std::optional<Fault> failure_;
  bool has_lost_process_ = false;
  bool wants_work_ = false;
};

bool is_made_batch(const PoolResult& result) {
  return result.kind == Kind::kAnswer && result.answer == AnswerKind::kBatch && result.batch &&
         std::ranges::equal(result.batch->payload(), made_batch()) &&
         result.batch->record_bytes() == kMadeRecordBytes && result.batch->region() == nullptr;
}

// ---- Work and its results

TEST_F(JobHostTest, WantsWorkBeforeThereIsAnyProcess) {
  start();
  take_turn();
  EXPECT_TRUE(wants_work_);
  EXPECT_EQ(host_->fds().size(), 1u) << "that of the warm process";
}

TEST_F(JobHostTest, WorkArrivesWithAllThatBelongsToIt) {
  start();
  EXPECT_EQ(told("tell", 11, {blob_id_of(12), blob_id_of(13)}),
            "trainer 11 tenancy 2 epoch 3 sequence 4 lane 5 starts index kind 3 seed 6 place 7 link 8 indices [1,2] "
            "seeds (9,10) blobs 12 13");
}

TEST_F(JobHostTest, BatchLiesInTheSlabThatItsProcessPassedAndReleasesIt) {
  start();
  auto first = made("slab");
  EXPECT_TRUE(is_made_batch(first)) << first.text;
  EXPECT_EQ(told("tell_slab"), "held");
  first.batch.reset();
  EXPECT_EQ(told("tell_slab"), "free");
  const auto second = made("slab");  // in the same memory, which is not passed again
  EXPECT_TRUE(is_made_batch(second)) << second.text;
}

TEST_F(JobHostTest, BatchOutlivesItsProcess) {
  start();
  const auto in_slab = made("slab");
  const auto in_memory_of_its_own = made("transient");
  EXPECT_EQ(made("kill").kind, Kind::kDied);
  EXPECT_TRUE(is_made_batch(in_slab)) << in_slab.text;
  EXPECT_TRUE(is_made_batch(in_memory_of_its_own)) << in_memory_of_its_own.text;
}

TEST_F(JobHostTest, BatchBehindItsHeadArrivesWithAllThatIsSaidOfIt) {
  start();
  const auto result = made("inline");
  EXPECT_TRUE(is_made_batch(result)) << result.text;
  EXPECT_EQ(result.flags, wire::kBatchThreadsDrew | wire::kBatchCompiled);
  EXPECT_EQ(result.cpu_share, 64);
  EXPECT_EQ(result.fetch_time, 11u);
  EXPECT_EQ(result.prefix_time, 12u);
  EXPECT_EQ(result.samples.dataset_time, 13u);
  EXPECT_EQ(result.samples.slowest_place, 14u);
  EXPECT_EQ(result.samples.slowest_share, 15u);
  EXPECT_EQ(result.sample_count, 16u);
  EXPECT_EQ(result.dataset_size, 17u);
  EXPECT_EQ(to_text(result.state), "the state after it");
  EXPECT_TRUE(result.text.empty());
}

// One that is not there is made as it is read; nothing can be taken away.
TEST_F(JobHostTest, MemoryThatItsProcessHasLeftOutIsZero) {
  start();
  const auto result = made("hole");
  ASSERT_TRUE(result.batch) << result.text;
  EXPECT_TRUE(std::ranges::all_of(result.batch->payload(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(JobHostTest, ReadsWhatWasFoundReadableAlone) {
  start();
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  offer("pid");
  ASSERT_TRUE(until([&] { return !offered_; }));
  wait_for_its_word();
  take_turn();
  EXPECT_FALSE(result_);
  host_->note_readable(host_->fds());
  take_turn();
  EXPECT_TRUE(result_);
}

TEST_F(JobHostTest, ResultsThatAreNoBatchArrive) {
  start();
  const auto error = made("error");
  EXPECT_EQ(error.kind, Kind::kAnswer);
  EXPECT_EQ(error.answer, AnswerKind::kError);
  EXPECT_EQ(error.text, std::string("ValueError\0no sample 7", 22));
  EXPECT_EQ(to_text(error.state), "the state after it");
  const auto end = made("end");
  EXPECT_EQ(end.kind, Kind::kAnswer);
  EXPECT_EQ(end.answer, AnswerKind::kEnd);
  EXPECT_EQ(made("give_up").kind, Kind::kGivenUp);
  const auto refusal = made("decline");
  EXPECT_EQ(refusal.kind, Kind::kDeclined);
  EXPECT_EQ(refusal.text, "not here");
}

TEST_F(JobHostTest, WhetherSomebodyWantsTheBatchIsTold) {
  start();
  offer("heed");
  ASSERT_TRUE(until([&] { return !offered_; }));
  host_->set_wanted(true);  // which it was
  host_->set_wanted(false);
  host_->set_wanted(false);
  host_->set_wanted(true);
  EXPECT_EQ(result().text, "unwanted, and wanted again");
  host_->set_wanted(false);  // of nothing
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
}

// ---- Work that is handed ahead

TEST_F(JobHostTest, WorkIsHandedAheadToAProcessThatHasAnsweredAndIsAtWork) {
  start();
  EXPECT_FALSE(host_->wants_ahead()) << "there is no process";
  offer("later");
  ASSERT_TRUE(until([&] { return !offered_; }));
  EXPECT_FALSE(host_->wants_ahead()) << "it may ask for the parts of its job";
  const pid_t pid = std::stoi(result().text);
  EXPECT_FALSE(host_->wants_ahead()) << "it has nothing in hand";
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  expect_lost();
  pid_of(1);
  offer("heed");
  ASSERT_TRUE(until([&] { return !offered_; }));
  EXPECT_TRUE(host_->wants_ahead());
  host_->set_wanted(false);
  EXPECT_FALSE(host_->wants_ahead());
  host_->set_wanted(true);
  EXPECT_EQ(result().text, "unwanted, and wanted again");
}

TEST_F(JobHostTest, WorkThatIsHandedAheadIsAnsweredOnceItIsOffered) {
  start();
  begin_with_ahead("until_signal", "pid");
  take_turn();
  EXPECT_FALSE(wants_work_);
  let_it_go_on();
  EXPECT_EQ(result().text, "done");
  EXPECT_EQ(result_of_ahead().text, std::to_string(pid_));
  EXPECT_EQ(pid_of(1), pid_);
  EXPECT_FALSE(has_lost_process_);
}

TEST_F(JobHostTest, WorkThatIsDroppedHasNoResultAndGivesItsSlabBack) {
  start();
  EXPECT_TRUE(is_made_batch(made("slab")));
  begin_with_ahead("until_signal", "await_unwanted");
  host_->drop_ahead();
  host_->drop_ahead();
  let_it_go_on();
  EXPECT_EQ(result().text, "done");
  EXPECT_EQ(told("tell_slab"), "free") << "nothing else is made before the process has let go of it";
  EXPECT_EQ(pid_of(1), pid_);
}

TEST_F(JobHostTest, WorkThatIsDroppedMeanwhileHasNoResult) {
  start();
  begin_with_ahead("until_signal", "end");
  let_it_go_on();
  EXPECT_EQ(result().text, "done");
  EXPECT_TRUE(wants_work_);
  host_->drop_ahead();
  EXPECT_EQ(pid_of(1), pid_);
}

TEST_F(JobHostTest, DeathInWorkThatWasHandedAheadIsOfThatWork) {
  start();
  for (const std::string word : {"exit", "garbage"}) {
    SCOPED_TRACE(word);
    begin_with_ahead("until_signal", word);
    let_it_go_on();
    EXPECT_EQ(result().text, "done");
    EXPECT_EQ(result_of_ahead().kind, Kind::kDied);
    EXPECT_FALSE(has_lost_process_) << "it is told twice";
  }
}

// The server may be busy until the process has ended.
TEST_F(JobHostTest, EndThatIsKnownBeforeTheWorkIsOfferedIsOfThatWork) {
  start();
  begin_with_ahead("until_signal", "exit");
  let_it_go_on();
  ASSERT_TRUE(wait_until_gone(pid_));
  host_->note_readable(host_->fds());
  EXPECT_EQ(result().text, "done");
  EXPECT_FALSE(has_lost_process_);
  EXPECT_FALSE(host_->wants_ahead());
  const auto died = result_of_ahead();
  EXPECT_EQ(died.kind, Kind::kDied);
  EXPECT_NE(died.text.find("ended with exit code 3"), std::string::npos) << died.text;
  EXPECT_NE(pid_of(1), pid_);
}

TEST_F(JobHostTest, AnswersToBothCountThoughTheProcessHasEnded) {
  start();
  begin_with_ahead("until_signal", "answer_and_exit");
  let_it_go_on();
  ASSERT_TRUE(wait_until_gone(pid_));
  host_->note_readable(host_->fds());
  EXPECT_EQ(result().text, "done");
  EXPECT_EQ(result_of_ahead().text, "last words");
  expect_lost();
}

TEST_F(JobHostTest, DeathInTheWorkInHandIsNotOfTheWorkBehindIt) {
  start();
  begin_with_ahead("kill", "end");
  EXPECT_EQ(result().kind, Kind::kDied);
  EXPECT_TRUE(until([&] { return wants_work_; }));
  EXPECT_FALSE(has_lost_process_);
  EXPECT_FALSE(host_->wants_ahead());
  host_->drop_ahead();  // of which nothing is left
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
}

TEST_F(JobHostTest, DeathInWorkThatWasDroppedIsOfNoWork) {
  start();
  begin_with_ahead("until_signal", "hang");
  let_it_go_on();
  EXPECT_EQ(result().text, "done");
  host_->drop_ahead();
  take_turn();
  EXPECT_FALSE(wants_work_);
  EXPECT_TRUE(host_->end_work("its dataset hangs"));
  expect_lost();
  EXPECT_NE(pid_of(1), pid_);
}

TEST_F(JobHostTest, WorkAheadEndsWithItsTrainer) {
  start();
  begin_with_ahead("hang", "end");
  host_->end_trainer(1);
  EXPECT_EQ(result().kind, Kind::kGivenUp);
  host_->drop_ahead();
  EXPECT_EQ(made("end", 2).answer, AnswerKind::kEnd);
  EXPECT_TRUE(until([&] { return is_gone(pid_); }));
  EXPECT_FALSE(has_lost_process_);
}

// ---- The parts of a job

TEST_F(JobHostTest, PartOfAJobArrivesInItsMessageOrInAFile) {
  start();
  const std::map<size_t, std::string> places{{0, "inline"},
                                             {100, "inline"},
                                             {kInlineBlobBytesMax, "inline"},
                                             {kInlineBlobBytesMax + 1, "in a file"},
                                             {3 * kMiB, "in a file"},
                                             {kBlobStepBytes + 5, "in a file"}};
  for (const auto& [size, place] : places) {
    blobs_.emplace(blob_id_of(7), made_blob(size));
    EXPECT_EQ(told("wish", 1, {blob_id_of(7)}), place + ", " + std::to_string(size) + " bytes");
  }
}

TEST_F(JobHostTest, PartOfAJobThatCannotBeHadIsAFault) {
  start();
  blobs_.emplace(blob_id_of(7), Fault{Errc::kUnsupported, "the trainer does not have it"});
  EXPECT_EQ(told("wish", 1, {blob_id_of(7)}), "none, unsupported: the trainer does not have it");
}

TEST_F(JobHostTest, LastWishCountsUntilOneIsGranted) {
  start();
  offer("wish_two", 1, {blob_id_of(7), blob_id_of(8)});
  ASSERT_TRUE(until([&] { return requested_blob_ == blob_id_of(8); }));
  host_->give_blob(blob_id_of(7), made_blob(200));
  host_->give_blob(blob_id_of(9), made_blob(300));
  blobs_.emplace(blob_id_of(8), made_blob(100));
  EXPECT_EQ(result().text, "inline, 100 bytes");
  EXPECT_FALSE(requested_blob_);
}

TEST_F(JobHostTest, PartOfAJobThatComesAfterTheWorkIsDropped) {
  start();
  host_->give_blob(blob_id_of(7), made_blob(100));
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  host_->give_blob(blob_id_of(7), made_blob(100));
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
}

TEST_F(JobHostTest, ProcessThatAsksAgainForWhatIsOnItsWayIsEnded) {
  start();
  offer("wish_again", 1, {blob_id_of(7)});
  ASSERT_TRUE(until([&] { return requested_blob_ == blob_id_of(7); }));
  host_->set_wanted(false);  // whereupon it asks again
  host_->give_blob(blob_id_of(7), made_blob(3 * kMiB));
  wait_for_its_word();
  host_->note_readable(host_->fds());
  const auto result = this->result();
  EXPECT_EQ(result.kind, Kind::kDied);
  EXPECT_NE(result.text.find("while another is being sent"), std::string::npos) << result.text;
}

// ---- How processes end

TEST_F(JobHostTest, DeathInTheMiddleOfWorkIsItsResultAndAnotherProcessMakesTheNextBatch) {
  start();
  expect_death("exit", "ended with exit code 3");
  expect_death("segv", "was ended by SIGSEGV");
  expect_death("kill", "was ended by SIGKILL");
  expect_death("hang_up", "closed the connection");
}

TEST_F(JobHostTest, WhatAProcessHasWrittenToStandardErrorIsToldWithItsEndAndForTheLog) {
  start();
  expect_death("complain", "ended with exit code 3; its last output: there is no disk");
  EXPECT_EQ(host_->take_output(), "there is no disk\n");
  EXPECT_EQ(host_->take_output(), "");
}

TEST_F(JobHostTest, WhatAProcessHasSaidBeforeItsEndCounts) {
  start();
  EXPECT_EQ(told("answer_and_exit"), "last words");
  expect_lost();
  EXPECT_NE(all_of(host_->take_notices()).find("ended with exit code 3"), std::string::npos);
}

TEST_F(JobHostTest, EndOfAProcessThatHasNoWorkIsTold) {
  start();
  const pid_t pid = pid_of(1);
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  expect_lost();
  EXPECT_TRUE(is_gone(pid));
  EXPECT_NE(pid_of(1), pid);
  EXPECT_FALSE(has_lost_process_);
}

TEST_F(JobHostTest, ProcessThatHangsIsEndedWithItsWork) {
  start();
  EXPECT_FALSE(host_->end_work("there is none"));
  offer("hang");
  ASSERT_TRUE(until([&] { return !offered_; }));
  EXPECT_TRUE(host_->end_work("its dataset hangs"));
  const auto ended = result();
  EXPECT_EQ(ended.kind, Kind::kDied);
  EXPECT_NE(ended.text.find("its dataset hangs"), std::string::npos) << ended.text;
  EXPECT_NE(all_of(host_->take_notices()).find("ends a job process: its dataset hangs"), std::string::npos);
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  EXPECT_FALSE(host_->end_work("there is none"));
}

TEST_F(JobHostTest, EachTrainerHasAProcessOfItsOwnAndTheOneBeforeKeepsIt) {
  start();
  const pid_t first = pid_of(1);
  EXPECT_EQ(pid_of(1), first);
  const pid_t second = pid_of(2);
  EXPECT_NE(second, first);
  EXPECT_EQ(pid_of(1), first);
  EXPECT_EQ(pid_of(2), second);
  const pid_t third = pid_of(3);
  EXPECT_NE(third, first);
  EXPECT_NE(third, second);
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  EXPECT_EQ(pid_of(2), second);
  EXPECT_NE(pid_of(1), first);
  EXPECT_FALSE(has_lost_process_) << "a process that was let go is nobody's loss";
}

TEST_F(JobHostTest, ParkedProcessEndsAfterItsTime) {
  start("forks", {.parked = milliseconds(1)});
  const pid_t first = pid_of(1);
  const pid_t second = pid_of(2);
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  EXPECT_FALSE(host_->has_process_of(1));
  EXPECT_EQ(pid_of(2), second);
  EXPECT_FALSE(has_lost_process_);
}

TEST_F(JobHostTest, ParkedProcessThatEndsOrSpeaksIsNobodysLoss) {
  start();
  const pid_t first = std::stoi(told("later"));
  const pid_t second = pid_of(2);
  ASSERT_EQ(::kill(first, SIGUSR1), 0);  // whereupon it answers
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  pid_of(1);
  ASSERT_EQ(::kill(second, SIGKILL), 0);
  EXPECT_TRUE(until([&] { return !host_->has_process_of(2); }));
  EXPECT_NE(pid_of(2), second);
  EXPECT_FALSE(has_lost_process_);
  EXPECT_FALSE(failure_);
}

TEST_F(JobHostTest, ProcessWithoutItsTrainerLingersAndEndsOrIsParkedForAnotherTrainer) {
  start("forks", {.linger = milliseconds(1)});
  const pid_t first = pid_of(1);
  host_->set_standing({.trainer_id = 2});  // which asks for nothing yet
  ASSERT_TRUE(until([&] { return !host_->due_at() || *host_->due_at() > clock_now() + minutes(1); }));
  EXPECT_TRUE(host_->has_process_of(1));
  EXPECT_EQ(pid_of(1), first);
  host_->set_standing({});
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  EXPECT_FALSE(host_->has_process_of(1));
  EXPECT_FALSE(has_lost_process_);
}

TEST_F(JobHostTest, ProcessEndsWithItsTrainerAlsoWhereItIsParked) {
  start();
  const pid_t first = pid_of(1);
  const pid_t second = pid_of(2);
  host_->end_trainer(3);
  EXPECT_TRUE(host_->has_process_of(1));
  host_->end_trainer(1);
  EXPECT_FALSE(host_->has_process_of(1));
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  EXPECT_EQ(pid_of(2), second);
  host_->end_trainer(2);
  EXPECT_TRUE(until([&] { return is_gone(second); }));
  EXPECT_FALSE(has_lost_process_);
  EXPECT_TRUE(host_->take_notices().empty());
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
}

TEST_F(JobHostTest, WorkOfATrainerThatHasEndedIsGivenUp) {
  start("forks", {.end_grace = milliseconds(1)});
  const pid_t pid = pid_of(1);
  offer("hang");
  ASSERT_TRUE(until([&] { return !offered_; }));
  host_->end_trainer(1);
  take_turn();
  ASSERT_TRUE(result_);
  EXPECT_EQ(result_->kind, Kind::kGivenUp);
  EXPECT_TRUE(wants_work_);
  EXPECT_EQ(made("end", 2).answer, AnswerKind::kEnd);
  EXPECT_TRUE(until([&] { return is_gone(pid); }));
  EXPECT_FALSE(has_lost_process_);
}

// The end of the process was waited for without end, and `penstock drain` with it.
TEST_F(JobHostTest, ProcessThatDoesNotEndIsGivenUp) {
  start("ends_no_process", {.end_grace = milliseconds(10)});
  const pid_t first = pid_of(1);
  offer("hang");
  ASSERT_TRUE(until([&] { return !offered_; }));
  EXPECT_TRUE(host_->end_work("its dataset hangs"));
  const auto given_up = result();
  EXPECT_EQ(given_up.kind, Kind::kDied);
  const std::string words =
      "did not exit within 10 ms after its server killed it (its dataset hangs), and is abandoned";
  EXPECT_EQ(given_up.text, words);
  EXPECT_FALSE(host_->end_work("there is none"));
  EXPECT_NE(all_of(host_->take_notices()).find(words), std::string::npos);
  EXPECT_TRUE(wants_work_);
  const pid_t second = pid_of(1);
  EXPECT_NE(second, first);
  ASSERT_EQ(::kill(first, SIGKILL), 0);  // its end comes late, and is not that of the other one
  EXPECT_TRUE(until([&] { return is_gone(first); }));
  EXPECT_EQ(pid_of(1), second);
  EXPECT_EQ(made("hang_up").kind, Kind::kDied);
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  EXPECT_FALSE(has_lost_process_);
  EXPECT_FALSE(failure_);
}

TEST_F(JobHostTest, ProcessesThatAreLetGoAndDoNotEndAreForgotten) {
  start("ends_no_process", {.end_grace = milliseconds(1), .parked = milliseconds(1)});
  host_->set_standing({.trainer_id = 2});
  const pid_t pid = std::stoi(told("later"));  // it waits for a signal, and not for its server
  EXPECT_EQ(made("end", 2).answer, AnswerKind::kEnd);
  EXPECT_TRUE(until([&] { return !host_->due_at(); }));
  EXPECT_EQ(host_->fds().size(), 3u) << "that of the warm process, and two of the process in use";
  EXPECT_FALSE(is_gone(pid));
}

TEST_F(JobHostTest, NoProcessIsLeftBehind) {
  start();
  const pid_t first = pid_of(1);
  const pid_t second = pid_of(2);
  offer("hang", 2);
  ASSERT_TRUE(until([&] { return !offered_; }));
  host_.reset();
  seat_.reset();
  hub_.reset();
  for (const pid_t pid : {first, second, warm_pid_}) EXPECT_TRUE(is_gone(pid));
}

TEST_F(JobHostTest, CpuTimeOfAllProcessesGrowsAndIsKeptWhenTheyEnd) {
  start();
  auto seen = host_->cpu_time();
  // The process was on CPUs for so long by its own clock.
  EXPECT_EQ(made("spin").answer, AnswerKind::kEnd);
  take_turn();
  EXPECT_GE(host_->cpu_time(), seen + milliseconds(20));
  seen = host_->cpu_time();
  pid_of(2);  // the first one was let go
  EXPECT_GE(host_->cpu_time(), seen);
  seen = host_->cpu_time();
  EXPECT_EQ(made("spin", 2).answer, AnswerKind::kEnd);
  take_turn();
  EXPECT_GE(host_->cpu_time(), seen + milliseconds(20));
  seen = host_->cpu_time();
  EXPECT_EQ(made("exit", 2).kind, Kind::kDied);
  EXPECT_GE(host_->cpu_time(), seen);
}

// ---- What no process of a job says

TEST_F(JobHostTest, ProcessThatSpeaksWronglyIsEnded) {
  start();
  const std::vector<std::pair<const char*, const char*>> wrongs{
      {"garbage", "is malformed"},
      {"no_message", "does not start with PNM1"},
      {"too_long", "bytes long, but may be"},
      {"other_slab", "outside the memory that it passed"},
      {"long_batch", "outside the memory that it passed"},
      {"unknown_arena", "lies in memory that it did not pass"},
      {"two_descriptors", "was received with 2 descriptors"},
      {"descriptor_of_nothing", "a message that mentions no file descriptors has some attached"},
      {"descriptor_inline", "a message that mentions no file descriptors has some attached"},
      {"unsealed", "not sealed"},
      {"other_work", "it answered another request"},
      {"old_arena_anew", "must be sent together"},
      {"state_of_an_end", "that only local workers send"},
      {"ready", "that only local workers send"},
      {"states", "that only local workers send"},
      {"state_in_the_batch", "that only local workers send"},
  };
  for (const auto& [word, text] : wrongs) expect_death(word, text);
}

TEST_F(JobHostTest, ProcessOfAnotherVersionIsEndedAndBothAreNamed) {
  start();
  expect_death("another_version", format_versions());
}

TEST_F(JobHostTest, ProcessThatDoesNotReadWhatItAskedForIsEnded) {
  start();
  blobs_.emplace(blob_id_of(7), made_blob(kInlineBlobBytesMax));
  blobs_.emplace(blob_id_of(8), made_blob(3 * kMiB));
  expect_death("wish_unread", "did not read it", {blob_id_of(7), blob_id_of(8)});
}

TEST_F(JobHostTest, MemoryForOneBatchIsNotRemembered) {
  start();
  EXPECT_TRUE(is_made_batch(made("transient")));
  expect_death("transient_again", "lies in memory that it did not pass");
}

TEST_F(JobHostTest, MemoryThatLastsIsRememberedUntilOtherIsPassed) {
  start();
  EXPECT_TRUE(is_made_batch(made("slab")));
  EXPECT_TRUE(is_made_batch(made("transient")));
  EXPECT_TRUE(is_made_batch(made("slab")));
  EXPECT_TRUE(is_made_batch(made("other_arena")));
  expect_death("former_arena", "lies in memory that it did not pass");
}

TEST_F(JobHostTest, SecondAnswerIsNoAnswerAndEndsTheProcess) {
  start();
  EXPECT_EQ(told("twice"), "once");
  expect_lost();
  EXPECT_NE(all_of(host_->take_notices()).find("without a request"), std::string::npos);
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
}

TEST_F(JobHostTest, AnswerWithoutWorkEndsTheProcess) {
  start();
  const pid_t pid = std::stoi(told("later"));
  take_turn();
  EXPECT_TRUE(wants_work_);
  ASSERT_EQ(::kill(pid, SIGUSR1), 0);
  expect_lost();
  EXPECT_NE(all_of(host_->take_notices()).find("without a request"), std::string::npos);
  EXPECT_TRUE(is_gone(pid));
}

// ---- The warm process, and the end

TEST_F(JobHostTest, ProcessThatCannotBeForkedIsADeath) {
  start("cannot_fork");
  const auto result = made("end");
  EXPECT_EQ(result.kind, Kind::kDied);
  EXPECT_NE(result.text.find("could not be started"), std::string::npos) << result.text;
  EXPECT_TRUE(until([&] { return wants_work_; }));
  EXPECT_FALSE(failure_);
}

TEST_F(JobHostTest, EndOfTheWarmProcessIsAFailureThatSaysHowItEnded) {
  start("leaves");
  offer("end");
  ASSERT_TRUE(until([&] { return failure_.has_value(); }));
  EXPECT_NE(failure_->message.find("ended with exit code 7"), std::string::npos) << failure_->message;
  EXPECT_FALSE(wants_work_);
}

TEST_F(JobHostTest, WarmProcessThatIsStoppedIsAFailureOnceAForkWaitsForIt) {
  start("forks", {.fork_max = milliseconds(10)});
  ASSERT_EQ(::kill(warm_pid_, SIGSTOP), 0);
  offer("end");
  EXPECT_TRUE(until([&] { return failure_.has_value(); }));
  EXPECT_FALSE(wants_work_);
  ASSERT_EQ(::kill(warm_pid_, SIGCONT), 0);
  ASSERT_TRUE(failure_);
  EXPECT_NE(failure_->message.find("has not answered for 10 ms"), std::string::npos) << failure_->message;
}

TEST_F(JobHostTest, WorkIsGivenUpWhereTheWarmProcessThatWouldEndItIsStopped) {
  start("forks", {.end_grace = milliseconds(10)});
  const pid_t pid = pid_of(1);
  ASSERT_EQ(::kill(warm_pid_, SIGSTOP), 0);
  offer("hang");
  ASSERT_TRUE(until([&] { return !offered_; }));
  EXPECT_TRUE(host_->end_work("its dataset hangs"));
  EXPECT_EQ(result().kind, Kind::kDied);
  EXPECT_FALSE(host_->end_work("there is none"));
  ASSERT_EQ(::kill(warm_pid_, SIGCONT), 0);
  EXPECT_NE(pid_of(1), pid);
  EXPECT_TRUE(until([&] { return is_gone(pid); }));
  EXPECT_FALSE(failure_);
}

TEST_F(JobHostTest, WarmProcessThatSpeaksOfAnythingElseIsAFailure) {
  start("says_it_again");
  offer("end");
  ASSERT_TRUE(until([&] { return failure_.has_value(); }));
  EXPECT_NE(failure_->message.find("must report only its job processes"), std::string::npos) << failure_->message;
  EXPECT_FALSE(wants_work_);
}

TEST_F(JobHostTest, WarmProcessOfAnotherVersionIsAFailureThatNamesBoth) {
  start("goes_on_in_another_version");
  offer("end");
  ASSERT_TRUE(until([&] { return failure_.has_value(); }));
  EXPECT_NE(failure_->message.find(format_versions()), std::string::npos) << failure_->message;
  EXPECT_FALSE(wants_work_);
}

TEST_F(JobHostTest, WantsNothingOnceItIsClosedAndKeepsTheFirstReason) {
  start();
  EXPECT_FALSE(host_->wait_closed(steady_clock::now() - minutes(1)));
  host_->close({Errc::kClosed, "it was drained"});
  host_->close({Errc::kFailed, "another reason"});
  const auto reason = host_->wait_closed(steady_clock::now() + minutes(1));
  ASSERT_TRUE(reason);
  EXPECT_EQ(reason->code, Errc::kClosed);
  EXPECT_EQ(reason->message, "it was drained");
  take_turn();
  EXPECT_FALSE(wants_work_);
}

TEST_F(JobHostTest, ItsProcessesEndWithItWhileTheWarmOneLivesOn) {
  start();
  const pid_t first = pid_of(1);
  const pid_t second = pid_of(2);
  offer("hang", 2);
  ASSERT_TRUE(until([&] { return !offered_; }));
  host_->close({Errc::kClosed, "it was drained"});
  host_.reset();
  seat_.emplace(*hub_);
  host_.emplace(*seat_, "another worker of tests");
  host_->set_waker(waker_);
  host_->set_standing({.trainer_id = 1});
  EXPECT_EQ(made("end").answer, AnswerKind::kEnd);
  // The warm process tells of no end before the process is gone, and of the ends of others in between.
  EXPECT_TRUE(until([&] { return is_gone(first) && is_gone(second); }));
  EXPECT_FALSE(failure_);
}

TEST_F(JobHostTest, LastNoticesAreKept) {
  start();
  for (int index = 0; index < 100; ++index) host_->add_notice(std::to_string(index));
  const auto notices = host_->take_notices();
  ASSERT_FALSE(notices.empty());
  EXPECT_LT(notices.size(), 100u);
  EXPECT_EQ(notices.front(), std::to_string(100 - notices.size()));
  EXPECT_EQ(notices.back(), "99");
  EXPECT_TRUE(host_->take_notices().empty());
}

}  // namespace
}  // namespace penstock::server
