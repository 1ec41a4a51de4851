// SPDX-License-Identifier: Apache-2.0
// A trainer's side of a pool on loopback with real sockets, against a worker by hand.
#include "pool_client/pool_client.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <semaphore>
#include <string>

#include "../net/pool_sockets.h"
#include "hand_worker.h"
#include "wire/control_record.h"

namespace penstock::pool_client {
namespace {

using Event = loader::Client::Event;
using net::Role;

class PoolClientTest : public net::PoolSocketsTest {
 protected:
  ~PoolClientTest() override {
    if (client_) client_->stop();
    if (worker_) worker_->end();
  }

  void start(HandWorker::Options worker, bool is_iterable = false) {
    auto server = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
    const auto endpoint = server->endpoint();
    worker_ = std::make_unique<HandWorker>(std::move(server), data_server(worker.worker_id), worker);
    begin(free_endpoint(), {{.worker_id = 5, .endpoint = endpoint}}, is_iterable);
  }

  std::unique_ptr<net::DataServer> data_server(uint64_t worker_id) {
    return net::DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0}, {.worker_id = worker_id},
                                 [] {})
        .value();
  }

  void begin(const net::Endpoint& controller, const std::vector<OwnWorker>& own_workers, bool is_iterable = false,
             net::Resolver::Lookup lookup = net::look_up) {
    auto source = std::make_unique<PoolSource>(PoolIoOptions{.controller = controller,
                                                             .keys = keys_.ring(Role::kTrainer),
                                                             .job = "a test",
                                                             .about = "",
                                                             .worker_count_max = 1,
                                                             .credit_bytes = 1 << 24,
                                                             .arena_bytes = 1 << 24,
                                                             .is_iterable = is_iterable,
                                                             .lookup = std::move(lookup)},
                                               net::RunId{.id = 7}, keys_.ring(Role::kTrainer), own_workers);
    PoolSource& pool = *source;
    client_ = std::make_unique<PoolClient>(
        loader::ClientOptions{.worker_count = 1, .shard_count = 1, .keep_workers = true}, pool, std::move(source));
    client_->use_blobs({wire::BlobId{}});
    ASSERT_TRUE(client_->start());
    client_->begin_epoch(std::as_bytes(std::span(std::string_view("seeds"))));
  }

  bool submit(int64_t index) {
    return client_->submit({.kind = wire::IndexKind::kInteger, .body = std::as_bytes(std::span(&index, 1))});
  }

  // The next event that is not about the number of workers.
  Event next() {
    const auto deadline = Clock::now() + kPatience;
    for (;;) {
      Event event = client_->try_next();
      if (event.kind == Event::Kind::kMoreRoom) continue;
      if (event.kind != Event::Kind::kNothing || Clock::now() > deadline) return event;
      client_->wait_until(Clock::now() + std::chrono::milliseconds(100));
    }
  }

  static void expect_counting(loader::Batch& batch, uint64_t bytes) {
    const auto& tensors = batch.tensors().all();
    ASSERT_EQ(tensors.size(), 1u);
    ASSERT_EQ(static_cast<uint64_t>(tensors[0].numel()), bytes);
    const auto* data = tensors[0].const_data_ptr<uint8_t>();
    const uint64_t first = batch.record().facts().sequence;
    const uint64_t period = std::min<uint64_t>(bytes, 256);
    for (uint64_t place = 0; place < period; ++place) ASSERT_EQ(data[place], static_cast<uint8_t>(first + place));
    ASSERT_EQ(std::memcmp(data, data + period, bytes - period), 0);
  }

  void expect_stream(uint64_t batch_bytes, int count, int first = 0) {
    int submitted_count = first;
    while (submitted_count < count && client_->has_room()) submit(submitted_count++);
    for (int sequence = first; sequence < count; ++sequence) {
      Event event = next();
      if (event.kind == Event::Kind::kNews) {
        news_ += event.message();
        event = next();
      }
      ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
      ASSERT_EQ(event.batch->record().facts().sequence, static_cast<uint64_t>(sequence));
      expect_counting(*event.batch, batch_bytes);
      EXPECT_FALSE(event.batch->record().state().empty());
      while (submitted_count < count && client_->has_room()) submit(submitted_count++);
    }
    EXPECT_EQ(next().kind, Event::Kind::kEnd);
  }

  std::string news_;  // while batches came
  std::unique_ptr<HandWorker> worker_;
  std::unique_ptr<PoolClient> client_;
};

uint64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) << 10;
}

// Holds a thread of this process up, wherever it is, for 3 s. False if there is none of that name.
bool hold_up(const std::string& name) {
  static std::binary_semaphore has_ended{0};
  struct sigaction action {};
  action.sa_handler = [](int) {
    timespec left{.tv_sec = 3, .tv_nsec = 0};
    while (::nanosleep(&left, &left) != 0) {
    }
    has_ended.release();
  };
  struct sigaction before {};
  ::sigaction(SIGUSR2, &action, &before);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string its_name;
    std::getline(std::ifstream(task.path() / "comm"), its_name);
    if (its_name != name) continue;
    if (::syscall(SYS_tgkill, ::getpid(), std::stoi(task.path().filename()), SIGUSR2) != 0) return false;
    has_ended.acquire();
    ::sigaction(SIGUSR2, &before, nullptr);
    return true;
  }
  return false;
}

TEST_F(PoolClientTest, BatchesArePutTogetherFromTheirPieces) {
  start({.batch_bytes = 5000, .piece_bytes = 700});
  expect_stream(5000, 20);
}

// A ping makes the thread look at a link, twice a second, so a message that it has slept over comes late and is not
// lost.
TEST_F(PoolClientTest, BatchesOfMorePiecesThanAreTakenInATurnWaitForNoPing) {
  constexpr int kBatchCount = 150;  // with a ping for each, 75 s
  start({.batch_bytes = 5000, .piece_bytes = 50});
  submit(0);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  const auto begun = Clock::now();
  expect_stream(5000, kBatchCount, 1);
  EXPECT_LT(Clock::now() - begun, std::chrono::minutes(1));
}

TEST_F(PoolClientTest, BatchWithoutOneOfItsPiecesIsAskedForAgain) {
  start({.batch_bytes = 5000, .piece_bytes = 700, .loses_piece_of = 3});
  expect_stream(5000, 8);
  EXPECT_NE(news_.find("is being reconnected"), std::string::npos) << news_;
}

TEST_F(PoolClientTest, BatchOfWhichProcessesOfAWorkerDieIsAnErrorThatSaysHowTheLastOneEnded) {
  start({.dies_of = 1});
  submit(0);
  submit(1);
  Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  expect_counting(*event.batch, 1000);
  event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  ASSERT_TRUE(event.batch->record().remote_error());
  const std::string& text = event.batch->record().remote_error()->text;
  EXPECT_EQ(text.find("3 workers in a row died while making batch 1 of epoch 1 (samples 1)"), 0u) << text;
  EXPECT_NE(text.find("(one of them at tcp://127.0.0.1:"), std::string::npos) << text;
  EXPECT_NE(text.find("; the last of them ended with exit code 3\\x1b[2J; check these samples"), std::string::npos)
      << text;
  submit(2);
  event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  expect_counting(*event.batch, 1000);
}

// The news of a death waited for them, and for a worker that knew nothing of the link any more: no death counted.
TEST_F(PoolClientTest, DeathIsHeardOfThoughThePiecesOfAnAnswerBeforeItNeverCome) {
  const auto death_count = std::make_shared<std::atomic<int>>(0);
  HandWorker::Options options{.dies_of = 2};
  options.may_send_pieces_of = [=](uint64_t sequence) { return sequence != 1 || death_count->load() > 0; };
  options.alter_message = [=](const ToTrainer& message, std::span<std::byte>) {
    if (message.kind == ToTrainer::Kind::kDied) death_count->fetch_add(1);
  };
  start(options);
  submit(0);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  submit(1);
  submit(2);
  Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  expect_counting(*event.batch, 1000);
  event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  ASSERT_TRUE(event.batch->record().remote_error());
  EXPECT_EQ(event.batch->record().remote_error()->text.find("3 workers in a row died"), 0u)
      << event.batch->record().remote_error()->text;
  EXPECT_EQ(death_count->load(), 3);
}

TEST_F(PoolClientTest, BatchLargerThanAnyBeforeItComesAsItIs) {
  constexpr uint64_t kBytes = 70 << 20;
  start({.batch_bytes = kBytes, .piece_bytes = 1 << 20});
  expect_stream(kBytes, 3);
}

TEST_F(PoolClientTest, BytesThatAreClaimedTakeNoMemoryBeforeTheyCome) {
  const uint64_t peak_before = peak_bytes();
  start({.claims_first = 1 << 30});
  expect_stream(1000, 3);
  EXPECT_LT(peak_bytes() - peak_before, 256u << 20);
}

TEST_F(PoolClientTest, BoolsOfAWorkerAreTrueOrFalseWhateverTheirBytes) {
  start({.make = [](uint64_t sequence) {
    MadeBatch made = count_up(1000, sequence);
    made.payload[made.payload.size() - made.record_bytes + 32] = std::byte{wire::kDTypeBool};  // the tensor's dtype
    return made;
  }});
  submit(0);
  const Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
  ASSERT_FALSE(event.batch->record().remote_error()) << event.batch->record().remote_error()->text;
  const auto* bytes = static_cast<const uint8_t*>(event.batch->tensors().all().at(0).const_data_ptr());
  EXPECT_EQ(bytes[0], 0);
  EXPECT_EQ(std::count(bytes, bytes + 256, 1), 255);
}

TEST_F(PoolClientTest, BatchesThatTheUserKeepsStayAsTheyAre) {
  start({.batch_bytes = 1 << 20, .piece_bytes = 1 << 19});
  std::vector<std::unique_ptr<loader::Batch>> kept;
  for (int sequence = 0; sequence < 40; ++sequence) {  // more than the arena has room for
    submit(sequence);
    Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    expect_counting(*event.batch, 1 << 20);
    kept.push_back(std::move(event.batch));
  }
  for (const auto& batch : kept) expect_counting(*batch, 1 << 20);
}

TEST_F(PoolClientTest, EpochThatIsLeftIsNotMixedWithTheNext) {
  start({});
  submit(0);
  submit(1);
  client_->begin_epoch(std::as_bytes(std::span(std::string_view("others"))));
  expect_stream(1000, 5);
}

TEST_F(PoolClientTest, ShardEndsAndWhatItWasAskedForIsForgotten) {
  start({.ends_at = 2}, /*is_iterable=*/true);
  submit(0);
  submit(1);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  submit(2);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  submit(3);
  EXPECT_EQ(next().kind, Event::Kind::kShardEnded);
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
}

// One such answer ended the epoch: every later request was dropped, and nothing was said of it.
TEST_F(PoolClientTest, EndOfAShardIsNoAnswerWhereThereAreNoShards) {
  start({.ends_at = 2});
  for (int sequence = 0; sequence < 4; ++sequence) submit(sequence);
  for (int sequence = 0; sequence < 2; ++sequence) {
    const Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    expect_counting(*event.batch, 1000);
  }
  const Event news = next();
  ASSERT_EQ(news.kind, Event::Kind::kNews);
  EXPECT_NE(news.message().find("worker 0000000000000005 at tcp://127.0.0.1:"), std::string::npos) << news.message();
  EXPECT_NE(news.message().find("it reported the end of a shard"), std::string::npos) << news.message();
  for (int sequence = 2; sequence < 4; ++sequence) {
    const Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    ASSERT_TRUE(event.batch->record().remote_error());
    EXPECT_NE(event.batch->record().remote_error()->text.find("batch " + std::to_string(sequence) +
                                                              " of epoch 1 was requested"),
              std::string::npos)
        << event.batch->record().remote_error()->text;
    EXPECT_EQ(event.batch->record().remote_error()->text.find("penstock drain"), std::string::npos)
        << "it is in no pool";
    EXPECT_NE(event.batch->record().remote_error()->worker.find("0000000000000005 at tcp://"), std::string::npos);
  }
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
}

// The trainer's thread ended with an assertion.
TEST_F(PoolClientTest, RecallThatIsAnsweredWithAnEndIsAnErrorThatNamesTheWorker) {
  start({.ends_recalls = true});
  submit(0);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  auto content = std::make_shared<session::RequestContent>();
  content->request = {.sequence = 0, .epoch = 1};
  content->seeds = std::make_shared<const std::vector<std::byte>>();
  content->blobs = std::make_shared<const std::vector<wire::BlobId>>(1);
  const loader::BatchRecord::Origin origin{.request = content, .worker_id = 5};
  client_->recall(origin);
  const auto recalled = client_->recalled(origin, Clock::now() + kPatience);
  ASSERT_TRUE(recalled) << recalled.error().message;
  ASSERT_TRUE(recalled.value()->record().remote_error());
  EXPECT_NE(
      recalled.value()->record().remote_error()->text.find("the rest of batch 0 of epoch 1 was requested 3 times"),
      std::string::npos)
      << recalled.value()->record().remote_error()->text;
  EXPECT_NE(recalled.value()->record().remote_error()->worker.find("0000000000000005"), std::string::npos);
}

TEST_F(PoolClientTest, LaneThatStartsInTheMiddleSaysWhere) {
  start({}, /*is_iterable=*/true);
  client_->set_lanes({{1, {.batch_count = 4, .state = {std::byte{'s'}}}}});
  client_->begin_epoch(std::as_bytes(std::span(std::string_view("resumed"))), {.sequence = 4});
  submit(4);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  client_->stop();
  worker_->end();
  EXPECT_EQ(worker_->starts(), std::vector<std::string>{std::string("\4\0\0\0\0\0\0\0s", 9)});
}

TEST_F(PoolClientTest, BlobIsHandedOutPieceByPiece) {
  wire::BlobId id{};
  id[0] = std::byte{9};
  start({.wishes = id});
  std::string blob(3 * wire::kBlobPieceBytesMax + 5, 'x');
  blob.back() = 'y';
  client_->put_blob(id, blob);
  submit(0);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  for (int sequence = 1; sequence < 200; ++sequence) {  // time for the pieces, one at a time
    submit(sequence);
    ASSERT_EQ(next().kind, Event::Kind::kBatch);
  }
  client_->stop();
  worker_->end();
  EXPECT_TRUE(worker_->blob() == blob) << worker_->blob().size();
}

TEST_F(PoolClientTest, WhyAWorkerDeclinesIsToldAndThePoolWaitedFor) {
  start({.declines = true});
  submit(0);
  const Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kNews);
  EXPECT_NE(event.message().find("another torch"), std::string::npos) << event.message();
  EXPECT_NE(event.message().find(" at tcp://127.0.0.1:"), std::string::npos) << event.message();
  EXPECT_NE(client_->describe_pool().find("no controller answered"), std::string::npos);
  EXPECT_NE(client_->describe_pool().find("another torch"), std::string::npos);
}

// The user was told that all workers had declined, and not why: the controller's roster came before the refusals.
TEST_F(PoolClientTest, RosterThatComesBeforeTheRefusalsOfWorkersSaysWhyTheyDecline) {
  auto controller = serve({.allowed_roles = {Role::kTrainer}});
  begin(controller->endpoint(), {});
  submit(0);
  const auto report = next_message(*controller);
  ASSERT_TRUE(report);
  const wire::TrainerRoster roster{.controller_id = 1,
                                   .view = 1,
                                   .is_settled = true,
                                   .pool_count = 2,
                                   .declined_count = 2,
                                   .declines = {{.worker_id = 8, .reason = "no module named 'images'"},
                                                {.worker_id = 9, .reason = "another torch"}}};
  ASSERT_TRUE(controller->send(report->peer.routing_id, wire::write_control(roster)));
  for (const std::string reason : {"no module named 'images'", "another torch"}) {
    const Event news = next();
    ASSERT_EQ(news.kind, Event::Kind::kNews);
    EXPECT_NE(news.message().find("does not work for this trainer: " + reason), std::string::npos) << news.message();
  }
  const Event failure = next();
  ASSERT_EQ(failure.kind, Event::Kind::kFailed);
  EXPECT_NE(failure.message().find("all of its 2 have rejected this job"), std::string::npos) << failure.message();
  EXPECT_NE(failure.message().find("worker 0000000000000008: no module named 'images'"), std::string::npos);
  EXPECT_NE(failure.message().find("worker 0000000000000009: another torch"), std::string::npos);
}

// A worker may choose any name for itself. The name server of one did not answer for 5 s, and every link was lost.
TEST_F(PoolClientTest, NameThatIsLookedUpForLongHoldsUpNoBatch) {
  std::promise<void> end;
  auto server = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
  const auto endpoint = server->endpoint();
  worker_ = std::make_unique<HandWorker>(std::move(server), data_server(5), HandWorker::Options{.batch_bytes = 1000});
  begin(free_endpoint(),
        {{.worker_id = 4, .endpoint = {.host = "stalled.example", .port = 1}}, {.worker_id = 5, .endpoint = endpoint}},
        false, [ended = end.get_future().share()](const std::string&) -> Result<net::HostAddress> {
          ended.wait();
          return Fault{Errc::kFailed, "nobody knows it"};
        });
  expect_stream(1000, 20);
  end.set_value();
}

// Whatever it is that holds the thread up: here a signal's handler does.
TEST_F(PoolClientTest, ThreadThatIsHeldUpForLongerThanALeaseLosesNoWorker) {
  start({.forgets_nobody = true});
  submit(0);
  ASSERT_EQ(next().kind, Event::Kind::kBatch);
  const int hello_count = worker_->hello_count();
  ASSERT_TRUE(hold_up("pk_pool_io"));
  expect_stream(1000, 5, 1);
  EXPECT_EQ(worker_->hello_count(), hello_count);
}

TEST_F(PoolClientTest, WorkerWhoseNameNobodyKnowsIsTold) {
  begin(free_endpoint(), {{.worker_id = 4, .endpoint = {.host = "unknown.example", .port = 1}}}, false,
        [](const std::string&) -> Result<net::HostAddress> {
          return Fault{Errc::kFailed, "nobody knows it"};
        });
  submit(0);
  const Event event = next();
  ASSERT_EQ(event.kind, Event::Kind::kNews);
  EXPECT_NE(event.message().find("no address is known for unknown.example (nobody knows it)"), std::string::npos)
      << event.message();
}

// Each refusal was kept for the user, 8 MiB of text and more.
TEST_F(PoolClientTest, GreetingIsRefusedOnceHoweverOftenAWorkerSaysSo) {
  start({.refusals_to_hello = 1000});
  submit(0);
  const Event first = next();
  ASSERT_EQ(first.kind, Event::Kind::kNews);
  EXPECT_NE(first.message().find("reason 0"), std::string::npos) << first.message();
  client_->wait_until(Clock::now() + std::chrono::milliseconds(300));
  EXPECT_EQ(client_->try_next().kind, Event::Kind::kNothing);
}

TEST_F(PoolClientTest, AnswersInTheNameOfAnotherWorkerAreNotHeard) {
  start({.worker_id = 6});
  submit(0);
  client_->wait_until(Clock::now() + std::chrono::milliseconds(300));
  EXPECT_EQ(client_->try_next().kind, Event::Kind::kNothing);
  EXPECT_EQ(client_->open_worker_count(), 0u);
}

}  // namespace
}  // namespace penstock::pool_client
