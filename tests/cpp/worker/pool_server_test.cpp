// SPDX-License-Identifier: Apache-2.0
// A pool's worker on loopback with real sockets and keys, a trainer by hand, and a controller by hand.
#include "worker/batch_server.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "../net/pool_sockets.h"
#include "../server/powercap_folder.h"
#include "base/event_loop.h"
#include "base/process.h"
#include "megabyte.h"
#include "net/tcp_socket.h"
#include "pool_trainer.h"
#include "server/maker.h"
#include "server/pool_server_io.h"
#include "wire/control_record.h"
#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::worker {
namespace {

using net::Role;
using server::AbandonedGrace;
using server::PoolServerOptions;
using server::PoolWork;
using server::PowercapFolder;
using server::Standing;
using wire::AnswerKind;
using wire::BlobId;
using wire::ToTrainer;
using wire::ToWorker;

// A batch of one tensor of `bytes` bytes, which count up from `first`.
BatchContent counting_batch(SlabWriter& writer, const wire::NestWriter& nest, int64_t bytes, int first) {
  writer.begin();
  at::Tensor tensor = writer.empty({bytes}, at::kByte);
  auto* data = tensor.mutable_data_ptr<uint8_t>();
  for (int64_t place = 0; place < bytes; ++place) data[place] = static_cast<uint8_t>(first + place);
  return {.tensors = {tensor}, .boundary_keys = {}, .nest = nest.view()};
}

class PoolServerTest : public net::PoolSocketsTest {
 protected:
  using Maker = std::function<void(PoolServer&, const PoolWork&)>;

  PoolServerTest() {
    at::set_num_threads(1);
    nest_.tensor(0);
  }
  ~PoolServerTest() override { end_worker(); }

  PoolServerOptions options(uint64_t arena_bytes = 64 * kMegabyte) const {
    return {.bind = {.host = "127.0.0.1", .port = 0}, .keys = keys_.ring(Role::kWorker), .arena_bytes = arena_bytes};
  }
  void start(PoolServerOptions options) {
    auto started = PoolServer::start(std::move(options));
    ASSERT_TRUE(started) << started.error().message;
    server_ = std::move(started).value();
  }
  // The worker's main thread: `maker` makes the requested batches until the worker ends.
  void work_by(Maker maker) {
    ended_ = std::async(std::launch::async, [this, maker = std::move(maker)]() -> Fault {
      for (;;) {
        auto work = server_->next(Clock::now() + std::chrono::seconds(1));
        if (work) {
          maker(*server_, *work.value());
        } else if (work.error().code != Errc::kTimeout) {
          return work.error();
        }
      }
    });
  }
  // Batches of as many bytes as the first index says.
  void serve_batches() {
    work_by([this](PoolServer& server, const PoolWork& work) { answer(server, work); });
  }
  void answer(PoolServer& server, const PoolWork& work) {
    int64_t bytes = 0;
    std::memcpy(&bytes, work.indices.data(), sizeof bytes);
    ++made_count_;
    tenancy_ = work.tenancy;
    const auto sequence = static_cast<int>(work.key.sequence);
    EXPECT_TRUE(server.answer(work, counting_batch(server.writer(), nest_, bytes, sequence), {.state = work.state}));
  }
  Fault end_worker() {
    if (server_ == nullptr) return {Errc::kClosed, ""};
    server_->close();
    return ended_.valid() ? ended_.get() : Fault{Errc::kClosed, ""};
  }

  std::unique_ptr<net::ClientSocket> join() {
    auto client = connect(server_->endpoint(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kWorker));
    expect_connected(*client);
    return client;
  }
  std::unique_ptr<PoolTrainer> train(const net::RunId& run) {
    auto trainer = std::make_unique<PoolTrainer>(context_, *resolver_, join(), run);
    trainer->begin(server_->worker_id());
    return trainer;
  }
  std::unique_ptr<PoolTrainer> train() { return train(run_); }

  static void expect_counting(const PoolTrainer::Answer& answer, size_t bytes, int first) {
    ASSERT_EQ(answer.kind, AnswerKind::kBatch);
    const auto record = std::span(answer.payload).last(answer.record_bytes);
    const auto frame = wire::parse_frame(record);
    ASSERT_TRUE(frame) << frame.error().message;
    ASSERT_EQ(frame.value().tensors.size(), 1u);
    const auto& entry = frame.value().tensors[0];
    ASSERT_EQ(entry.bytes, bytes);
    ASSERT_LE(entry.offset + bytes, answer.payload.size() - answer.record_bytes);
    size_t wrong_count = 0;
    for (size_t place = 0; place < bytes; ++place)
      if (answer.payload[entry.offset + place] != static_cast<std::byte>(first + place)) ++wrong_count;
    EXPECT_EQ(wrong_count, 0u);
  }

  const net::RunId run_ = net::draw_run_id(keys_.public_key(Role::kTrainer));
  const net::RunId other_run_ = net::draw_run_id(keys_.public_key(Role::kTrainer));
  wire::NestWriter nest_;
  std::atomic<uint64_t> made_count_{0};
  std::atomic<uint64_t> tenancy_{0};  // of the last batch
  std::unique_ptr<PoolServer> server_;
  std::future<Fault> ended_;
};

// A dataset that forked a child, which ended as Python does, joined a thread that the child does not have.
TEST_F(PoolServerTest, AForkedChildThatDropsTheServerLeavesItsParentsAlone) {
  auto started = PoolServer::start(options());
  ASSERT_TRUE(started) << started.error().message;
  PoolServer::Handle server(std::move(started).value().release());
  EXPECT_EQ(test::in_child([&]() -> std::string {
              server.reset();
              return "";
            }),
            "");
  const auto work = server->next(std::chrono::steady_clock::now() + std::chrono::milliseconds(10));
  ASSERT_FALSE(work);
  EXPECT_EQ(work.error().code, Errc::kTimeout) << "the parent's serves on";
}

// A worker whose parent was killed while it began said where it listens, and crashed.
TEST_F(PoolServerTest, AServerThatHasEndedStillKnowsWhereItListened) {
  start(options());
  const std::string endpoint = server_->endpoint().text();
  const std::string data_endpoint = server_->data_endpoint().text();
  server_->drain();
  const auto work = server_->next(Clock::now() + std::chrono::seconds(10));
  ASSERT_FALSE(work);
  ASSERT_EQ(work.error().code, Errc::kClosed) << work.error().message;
  EXPECT_EQ(server_->endpoint().text(), endpoint);
  EXPECT_EQ(server_->data_endpoint().text(), data_endpoint);
}

TEST_F(PoolServerTest, BatchesComeInPiecesAndAreWhatWasMade) {
  start(options());
  serve_batches();
  const auto trainer = train();
  const std::vector<int64_t> sizes{1, 1000, 9 * int64_t{kMegabyte}, 40 * int64_t{kMegabyte}, 16 * int64_t{kMegabyte}};
  for (size_t sequence = 0; sequence < sizes.size(); ++sequence) trainer->ask(sequence, {.indices = {sizes[sequence]}});
  for (size_t sequence = 0; sequence < sizes.size(); ++sequence) {
    SCOPED_TRACE(sequence);
    const auto& answer = trainer->answer(sequence);
    expect_counting(answer, static_cast<size_t>(sizes[sequence]), static_cast<int>(sequence));
    EXPECT_EQ(answer.piece_count, (answer.payload.size() + wire::kPieceBytesMax - 1) / wire::kPieceBytesMax);
  }
}

TEST_F(PoolServerTest, AStateTravelsBesideTheLastPiece) {
  start(options());
  serve_batches();
  const auto trainer = train();
  const auto state = filled(3 * kMegabyte, 9);
  constexpr auto kPieceBytes = static_cast<int64_t>(wire::kPieceBytesMax);
  for (const int64_t bytes : {kPieceBytes - 2000, kPieceBytes, 7 * kPieceBytes / 2}) {
    const auto sequence = static_cast<uint64_t>(bytes);
    trainer->ask(sequence, {.indices = {bytes}, .state = state}, /*lane=*/1);
    const auto& answer = trainer->answer(sequence);
    expect_counting(answer, static_cast<size_t>(bytes), static_cast<int>(sequence));
    // It is the request's that the worker sends back, and only the first one starts the lane.
    EXPECT_EQ(answer.state, bytes == kPieceBytes - 2000 ? state : PoolTrainer::Bytes{});
  }
}

TEST_F(PoolServerTest, ErrorsAndEndsAreAnswersToo) {
  start(options());
  work_by([](PoolServer& server, const PoolWork& work) {
    if (work.key.sequence == 0) return server.answer_end(work);
    EXPECT_TRUE(server.answer_error(work, {.type_name = "KeyError", .text = "no 'x'"}, filled(10, 1)));
  });
  const auto trainer = train();
  trainer->ask(0, {}, /*lane=*/1);
  EXPECT_EQ(trainer->answer(0).kind, AnswerKind::kEnd);
  trainer->ask(1, {});
  EXPECT_EQ(trainer->answer(1).kind, AnswerKind::kError);
  EXPECT_EQ(trainer->answer(1).text, std::string("KeyError\0no 'x'", 15));
  EXPECT_EQ(trainer->answer(1).state, filled(10, 1));
}

TEST_F(PoolServerTest, EachAnswerTellsWhatTheProcessHasSpent) {
  PowercapFolder folder;
  folder.add("intel-rapl:0", "package-0", 1'000'000'000, 0);
  auto with_energy = options();
  with_energy.powercap = folder.path();
  start(std::move(with_energy));
  work_by([this](PoolServer& server, const PoolWork& work) {
    EXPECT_TRUE(server.answer(work, counting_batch(server.writer(), nest_, 10, 0), {.sample_count = 3}));
  });
  const auto trainer = train();
  trainer->ask(0, {});
  const auto first = trainer->answer(0).meter;
  EXPECT_EQ(trainer->answer(0).sample_count, 3u);
  EXPECT_GT(first.cpu_ns, 0u);
  EXPECT_TRUE(first.has_energy());
  folder.set("intel-rapl:0", 500'000'000);
  auto last = first;
  const auto deadline = Clock::now() + kPatience;
  const auto has_grown = [&] { return last.energy_uj > first.energy_uj && last.cpu_ns > first.cpu_ns; };
  for (uint64_t sequence = 1; !has_grown() && Clock::now() < deadline; ++sequence) {
    trainer->ask(sequence, {});
    last = trainer->answer(sequence).meter;
    ASSERT_TRUE(last.has_energy());
  }
  EXPECT_TRUE(has_grown());
  EXPECT_LE(last.energy_uj, 500'000'000u);
}

TEST_F(PoolServerTest, PowercapTreeThatIsAskedForMustBeReadable) {
  PowercapFolder folder;
  auto with_energy = options();
  with_energy.powercap = folder.path();
  const auto started = PoolServer::start(std::move(with_energy));
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().code, Errc::kFailed);
  EXPECT_NE(started.error().message.find("without --powercap the worker runs"), std::string::npos)
      << started.error().message;
}

TEST_F(PoolServerTest, WhatAMessageCannotCarryIsSaidAndCanBeAnsweredOtherwise) {
  start(options());
  work_by([this](PoolServer& server, const PoolWork& work) {
    const auto answered =
        server.answer(work, counting_batch(server.writer(), nest_, 10, 0), {.state = filled(9 * kMegabyte, 1)});
    ASSERT_FALSE(answered);
    EXPECT_EQ(answered.error().code, Errc::kTooLarge);
    EXPECT_TRUE(server.answer_error(work, {.type_name = "ValueError", .text = answered.error().message}, {}));
  });
  const auto trainer = train();
  trainer->ask(0, {});
  EXPECT_NE(trainer->answer(0).text.find("state_dict"), std::string::npos);
}

// Every worker in turn sent it, and the trainer refused it of each.
TEST_F(PoolServerTest, BatchOfMoreElementsThanATrainerTakesIsAnErrorOfTheDataset) {
  start(options());
  work_by([this](PoolServer& server, const PoolWork& work) {
    const auto expanded = [&](int64_t count) {
      server.writer().begin();
      return server.answer(
          work, {.tensors = {at::zeros({1}).expand({count})}, .boundary_keys = {}, .nest = nest_.view()}, {});
    };
    constexpr int64_t kMost = wire::kElementBytesMax / sizeof(float);
    const auto refused = expanded(kMost + 1);
    EXPECT_EQ(refused.error().code, Errc::kTooLarge);
    EXPECT_NE(refused.error().message.find("expand them in the program"), std::string::npos);
    EXPECT_TRUE(expanded(kMost));
  });
  auto trainer = train();
  trainer->ask(0, {});
  EXPECT_EQ(trainer->answer(0).kind, AnswerKind::kBatch);
}

TEST_F(PoolServerTest, ARequestHasWhatTheTrainerSaid) {
  start(options());
  PoolWork seen;
  work_by([&](PoolServer& server, const PoolWork& work) {
    seen = work;
    answer(server, work);
  });
  const auto trainer = train();
  BlobId job;
  job.fill(std::byte{5});
  BlobId prefix;
  prefix.fill(std::byte{6});
  trainer->ask(
      3, {.indices = {4, 5}, .seeds = filled(3, 1), .state = filled(4, 2), .blobs = {job, prefix}, .epoch_seed = 99},
      /*lane=*/2);
  trainer->answer(3);
  EXPECT_EQ(seen.trainer_id, run_.id);
  EXPECT_EQ(seen.key, (wire::BatchKey{.epoch = 1, .sequence = 3}));
  EXPECT_EQ(seen.lane, 2u);
  EXPECT_TRUE(seen.is_lane_start);
  EXPECT_EQ(seen.index_kind, wire::IndexKind::kIntegers);
  EXPECT_EQ(seen.indices.size(), 16u);
  EXPECT_EQ(seen.seeds, filled(3, 1));
  EXPECT_EQ(seen.state, filled(4, 2));
  EXPECT_EQ(seen.epoch_seed, 99u);
  EXPECT_EQ(seen.blobs, (std::vector{job, prefix}));
  ASSERT_EQ(seen.prefixes().size(), 1u);
  EXPECT_EQ(seen.prefixes()[0], prefix);
}

TEST_F(PoolServerTest, AnAnswerThatWasLostIsSentAgainAndNotMadeAgain) {
  start(options());
  serve_batches();
  const auto trainer = train();
  trainer->answers_to_lose = 1;
  trainer->ask(0, {.indices = {20 * int64_t{kMegabyte}}});
  expect_counting(trainer->answer(0), 20 * kMegabyte, 0);
  EXPECT_EQ(made_count_, 1);
  trainer->ask(1, {.indices = {100}});
  trainer->answer(1);
  EXPECT_EQ(tenancy_, 1u);
}

TEST_F(PoolServerTest, ATrainerThatConnectsAgainIsServedOverItsNewConnection) {
  start(options());
  serve_batches();
  const uint64_t worker_id = server_->worker_id();
  {
    const auto trainer = train();
    trainer->ask(0, {.indices = {100}});
    trainer->answer(0);
  }
  EXPECT_EQ(tenancy_, 1u);
  // Another run of the trainer has to wait until the one that vanished without a word is forgotten.
  const auto again = std::make_unique<PoolTrainer>(context_, *resolver_, join(), other_run_);
  again->begin(worker_id);
  again->ask(0, {.indices = {100}});
  expect_counting(again->answer(0), 100, 0);
  EXPECT_EQ(again->refusal, "it serves another trainer");
  EXPECT_EQ(tenancy_, 2u);
}

TEST_F(PoolServerTest, PingsAreAnsweredWhileABatchIsMade) {
  start(options());
  std::promise<void> is_made;
  std::shared_future<void> made = is_made.get_future().share();
  work_by([&](PoolServer& server, const PoolWork& work) {
    made.wait();
    answer(server, work);
  });
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  EXPECT_TRUE(trainer->serve_until([&] { return trainer->said.contains(ToTrainer::Kind::kPong); }));
  EXPECT_FALSE(trainer->has(0));
  is_made.set_value();
  expect_counting(trainer->answer(0), 100, 0);
}

// Messages as they are, without a session, which acknowledges at once.
class RawLink {
 public:
  RawLink(std::unique_ptr<net::ClientSocket> socket, const net::RunId& run, uint32_t link = 1)
      : socket_(std::move(socket)), run_(run), link_(link) {
    send({.kind = ToWorker::Kind::kHello});
  }
  void send(ToWorker message, int64_t bytes = 0) {
    message.trainer_id = run_.id;
    message.link = link_;
    message.stamp = ++stamp_;
    const auto indices = std::as_bytes(std::span(&bytes, 1));
    wire::PoolRequest request{.message = message};
    if (message.kind == ToWorker::Kind::kHello) {
      request.offer = {.ciphers = net::fast_ciphers()};
      request.secret = run_.secret;
    }
    if (message.kind == ToWorker::Kind::kRequest) {
      request.index_kind = wire::IndexKind::kInteger;
      request.indices = indices;
    }
    ASSERT_TRUE(socket_->send(wire::write_to_worker(request)));
  }
  net::ClientSocket& socket() const { return *socket_; }

 private:
  std::unique_ptr<net::ClientSocket> socket_;
  const net::RunId run_;
  const uint32_t link_;
  uint64_t stamp_ = 0;
};

// Who had read a trainer's id in the status took its batches with one hello, and no later hello of the trainer itself
// counted.
TEST_F(PoolServerTest, AnotherInTheNameOfATrainerGetsNothingAndDisturbsNothing) {
  const net::KeyPair anns = net::KeyPair::generate();
  start({.bind = {.host = "127.0.0.1", .port = 0},
         .keys = keys_.ring(Role::kWorker, net::KeyOrigin::kGiven, {{anns.public_key(), "ann"}}),
         .arena_bytes = 64 * kMegabyte});
  std::promise<void> is_begun;
  std::promise<void> may_end;
  work_by([&, is_first = true](PoolServer& server, const PoolWork& work) mutable {
    if (std::exchange(is_first, false)) {
      is_begun.set_value();
      may_end.get_future().wait();
    }
    answer(server, work);
  });
  auto with_role_key = join();
  auto with_anns_key = connect(server_->endpoint(), anns, keys_.public_key(Role::kWorker));
  expect_connected(*with_anns_key);
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  auto begun = is_begun.get_future();
  ASSERT_TRUE(
      trainer->serve_until([&] { return begun.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));

  constexpr uint32_t kLastLink = ~uint32_t{0};
  RawLink impostors[] = {
      {std::move(with_role_key), {.id = run_.id}, kLastLink},
      {std::move(with_anns_key), run_, kLastLink},  // who even has the secret
  };
  const wire::BatchKey key{.epoch = 1, .sequence = 0};
  for (RawLink& impostor : impostors) {
    for (const auto kind : {ToWorker::Kind::kRequest, ToWorker::Kind::kCancel, ToWorker::Kind::kAck,
                            ToWorker::Kind::kPing, ToWorker::Kind::kBye})
      impostor.send({.kind = kind, .key = key});
    impostor.send({.kind = ToWorker::Kind::kHello});
    for (int hello = 0; hello < 2; ++hello) {  // and nothing in between
      net::ClientReceipt receipt;
      ASSERT_TRUE(trainer->serve_until([&] { return impostor.socket().try_receive(receipt).value(); }));
      const auto parsed = wire::parse_to_trainer(receipt.parts.at(0).bytes());
      ASSERT_TRUE(parsed) << parsed.error().message;
      EXPECT_EQ(parsed.value().message.kind, ToTrainer::Kind::kRefused);
      EXPECT_EQ(parsed.value().message.link, kLastLink);
    }
  }
  may_end.set_value();
  expect_counting(trainer->answer(0), 100, 0);
  trainer->answers_to_lose = 1;  // so that it has to begin another link
  trainer->ask(1, {.indices = {100}});
  expect_counting(trainer->answer(1), 100, 1);
  end_worker();
  std::string notices;
  for (const std::string& notice : server_->take_notices()) notices += notice + "\n";
  const std::string claim = "rejected a process that falsely claims to be trainer " + format_id(run_.id) + "; ";
  EXPECT_EQ(notices, claim + "it has the key of the role trainer: check who holds that key\n" + claim +
                         "it has the key of the user ann: check who holds that key\n");
}

// Makes nothing, has something of one trainer's, and notes who has ended.
class KeepingMaker final : public server::Maker {
 public:
  explicit KeepingMaker(uint64_t kept_id) : kept_id_(kept_id) {}

  void set_waker(Waker& waker) { waker_ = &waker; }
  uint64_t ended_id() const { return ended_id_; }

  Needs take_needs() override { return {}; }
  void offer(std::shared_ptr<const PoolWork>) override {}
  void set_wanted(bool) override {}
  void give_blob(const BlobId&, Result<std::vector<std::byte>>) override {}
  void add_notice(std::string) override {}
  void set_standing(const Standing&) override {}
  void close(Fault) override {}
  void wake() const override { waker_->wake(); }
  void end_trainer(uint64_t trainer_id) override { ended_id_ = trainer_id; }
  bool has_process_of(uint64_t trainer_id) const override { return trainer_id == kept_id_; }

 private:
  const uint64_t kept_id_;
  Waker* waker_ = nullptr;
  std::atomic<uint64_t> ended_id_{0};
};

TEST_F(PoolServerTest, GoodbyeForGoodEndsWhatIsKeptOfItsTrainerAndNobodyElseSaysItInItsName) {
  KeepingMaker maker(run_.id);
  const PoolServerOptions options = this->options();
  server::PoolServerIo io(options, net::draw_run_id(options.keys.own().public_key()), maker, nullptr);
  EventLoop loop("pk_pool_server", "which communicates with trainers", io);
  maker.set_waker(loop.waker());
  ASSERT_TRUE(loop.start());
  const auto link_of = [&](const net::RunId& run) {
    auto client = connect(io.endpoint(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kWorker));
    expect_connected(*client);
    return RawLink(std::move(client), run);
  };
  const auto expect_reported = [&](const RawLink& link, ToTrainer::Kind kind) {
    const auto receipt = next_message(link.socket());
    ASSERT_TRUE(receipt);
    const auto parsed = wire::parse_to_trainer(receipt->parts[0].bytes());
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().message.kind, kind);
  };
  RawLink trainer = link_of(run_);
  expect_reported(trainer, ToTrainer::Kind::kWelcome);
  trainer.send({.kind = ToWorker::Kind::kBye, .is_continued = true});
  trainer.send({.kind = ToWorker::Kind::kPing});  // to a worker that serves it no more
  expect_reported(trainer, ToTrainer::Kind::kBroken);
  EXPECT_EQ(maker.ended_id(), 0u);
  RawLink impostor = link_of({.id = run_.id});
  expect_reported(impostor, ToTrainer::Kind::kRefused);
  impostor.send({.kind = ToWorker::Kind::kBye});
  impostor.send({.kind = ToWorker::Kind::kHello});
  expect_reported(impostor, ToTrainer::Kind::kRefused);
  EXPECT_EQ(maker.ended_id(), 0u);
  trainer.send({.kind = ToWorker::Kind::kBye});
  trainer.send({.kind = ToWorker::Kind::kPing});
  expect_reported(trainer, ToTrainer::Kind::kBroken);
  EXPECT_EQ(maker.ended_id(), run_.id);
}

TEST_F(PoolServerTest, SlabsComeBackWithAcknowledgementsAndCancellationsAlone) {
  constexpr uint64_t kSlabCount = 10;
  start(options(kSlabCount * kMegabyte));
  serve_batches();
  RawLink link(join(), run_);
  const auto key = [](uint64_t sequence) { return wire::BatchKey{.epoch = 1, .sequence = sequence}; };
  for (uint64_t sequence = 0; sequence < kSlabCount + 2; ++sequence)
    link.send({.kind = ToWorker::Kind::kRequest, .key = key(sequence)}, kMegabyte / 2);
  uint64_t answered_count = 0;
  const auto take_answers = [&](uint64_t count) {
    while (answered_count < count) {
      const auto receipt = next_message(link.socket());
      ASSERT_TRUE(receipt);
      const auto parsed = wire::parse_to_trainer(receipt->parts[0].bytes());
      ASSERT_TRUE(parsed);
      if (parsed.value().message.kind == ToTrainer::Kind::kAnswer) ++answered_count;
    }
  };
  take_answers(kSlabCount);
  EXPECT_LE(made_count_, kSlabCount + 1) << "the last one waits for a slab";
  link.send({.kind = ToWorker::Kind::kCancel, .key = key(2)});
  take_answers(kSlabCount + 1);
  link.send({.kind = ToWorker::Kind::kAck, .key = key(0)});
  take_answers(kSlabCount + 2);
  EXPECT_EQ(made_count_, kSlabCount + 2);
}

TEST_F(PoolServerTest, ATrainerThatIsSilentIsForgottenWithAllThatItHad) {
  start(options(6 * kMegabyte));
  serve_batches();
  {
    RawLink link(join(), run_);
    for (uint64_t sequence = 0; sequence < 8; ++sequence)
      link.send({.kind = ToWorker::Kind::kRequest, .key = {.epoch = 1, .sequence = sequence}}, kMegabyte / 2);
  }
  const auto trainer = train(other_run_);
  for (uint64_t sequence = 0; sequence < 10; ++sequence) trainer->ask(sequence, {.indices = {kMegabyte / 2}});
  for (uint64_t sequence = 0; sequence < 10; ++sequence)
    expect_counting(trainer->answer(sequence), kMegabyte / 2, static_cast<int>(sequence));
}

TEST_F(PoolServerTest, ADrainGivesBackWhatWasNotBegunAndEndsWhenTheRestIsTaken) {
  start(options());
  std::promise<void> is_begun;
  std::promise<void> is_made;
  work_by([&](PoolServer& server, const PoolWork& work) {
    is_begun.set_value();
    is_made.get_future().wait();
    answer(server, work);
  });
  const auto trainer = train();
  for (uint64_t sequence = 0; sequence < 3; ++sequence) trainer->ask(sequence, {.indices = {100}});
  auto begun = is_begun.get_future();
  ASSERT_TRUE(
      trainer->serve_until([&] { return begun.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  const auto number = static_cast<char>(SIGTERM);
  ASSERT_EQ(::write(server_->signal_fd(), &number, 1), 1);
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->said.contains(ToTrainer::Kind::kLeaving); }));
  EXPECT_EQ(trainer->session().dispatch().unanswered_count(), 3u);
  EXPECT_EQ(server_->standing(),
            (Standing{.trainer_id = run_.id, .drain_cause = Standing::DrainCause::kSigterm, .left_count = 1}));
  is_made.set_value();
  expect_counting(trainer->answer(0), 100, 0);
  ASSERT_TRUE(
      trainer->serve_until([&] { return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_EQ(ended_.get(), (Fault{Errc::kClosed, "this worker was drained"}));
  EXPECT_FALSE(trainer->has(1));
}

TEST_F(PoolServerTest, ATrainerThatIsDeclinedIsToldWhyAndAnotherIsServed) {
  start(options());
  work_by([this](PoolServer& server, const PoolWork& work) {
    if (work.trainer_id == run_.id) return server.decline("no module named 'that'");
    answer(server, work);
  });
  auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().declined_count() == 1; }));
  EXPECT_EQ(trainer->refusal, "no module named 'that'");
  trainer = train();  // the same, which has forgotten
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().declined_count() == 1; }));
  EXPECT_EQ(trainer->refusal, "no module named 'that'");
  const auto other = train(other_run_);
  other->ask(0, {.indices = {100}});
  expect_counting(other->answer(0), 100, 0);
}

TEST_F(PoolServerTest, ATrainerOfAnotherVersionIsAnswered) {
  start(options());
  serve_batches();
  const auto client = join();
  auto bytes = wire::write_to_worker({.message = {.kind = ToWorker::Kind::kPing, .trainer_id = 7, .link = 1}});
  bytes[4] = std::byte{99};
  ASSERT_TRUE(client->send(bytes));
  const auto receipt = next_message(*client);
  ASSERT_TRUE(receipt);
  const auto parsed = wire::parse_to_trainer(receipt->parts.at(0).bytes());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed.value().message.kind, ToTrainer::Kind::kDeclined);
}

// ---- Blobs

class BlobTransfer : public PoolServerTest {
 protected:
  BlobTransfer() { id_.fill(std::byte{3}); }

  // The worker's main thread asks for the blob, and answers with an error that holds the blob's text.
  void serve_blob(PoolServerOptions options) {
    start(std::move(options));
    work_by([this](PoolServer& server, const PoolWork& work) {
      auto blob = server.blob(id_, Clock::now() + kPatience);
      if (blob) {
        got_ = std::move(blob).value();
      } else {
        error_ = blob.error();
        if (!server.is_wanted()) return server.give_up();
      }
      EXPECT_TRUE(server.answer_error(work, {}, {}));
    });
    trainer_ = train();
  }
  static PoolTrainer::Bytes random_bytes(size_t size) {
    PoolTrainer::Bytes bytes(size);
    uint32_t value = 1;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>((value = value * 1664525 + 1013904223) >> 24);
    return bytes;
  }
  std::optional<Errc> error_code() const { return error_ ? std::optional(error_->code) : std::nullopt; }

  BlobId id_;
  std::unique_ptr<PoolTrainer> trainer_;
  PoolTrainer::Bytes got_;
  std::optional<Fault> error_;
};

TEST_F(BlobTransfer, TwentyMegabytesComeWholeAlsoWhereWishesAreLost) {
  serve_blob(options());
  trainer_->blobs[id_] = random_bytes(20 * kMegabyte + 17);
  trainer_->requests_to_ignore = 1;
  trainer_->ask(0, {.blobs = {id_}});
  trainer_->answer(0);
  EXPECT_EQ(got_, trainer_->blobs[id_]);
  got_.clear();
  trainer_->blob_piece_bytes = 100'000;  // a trainer may send less than it may
  trainer_->blobs[id_].resize(1'000'001);
  trainer_->ask(1, {.blobs = {id_}});
  trainer_->answer(1);
  EXPECT_EQ(got_, trainer_->blobs[id_]);
  EXPECT_EQ(error_code(), std::nullopt);
}

TEST_F(BlobTransfer, WhatTheTrainerDoesNotHaveIsSaid) {
  serve_blob(options());
  trainer_->ask(0, {.blobs = {id_}});
  trainer_->answer(0);
  EXPECT_EQ(error_code(), Errc::kUnsupported);
}

// A job's id follows from its bytes, so whoever trains with the same dataset knows it.
TEST_F(BlobTransfer, AnotherCannotSayThatABlobIsUnknownOrSpoilIt) {
  serve_blob(options());
  const RawLink stranger(join(), other_run_);
  trainer_->blobs[id_] = random_bytes(100);
  trainer_->requests_to_ignore = 1'000'000;
  trainer_->ask(0, {.blobs = {id_}});
  ASSERT_TRUE(trainer_->serve_until([&] { return trainer_->requests_to_ignore < 1'000'000; }));
  const auto unknown = wire::write_blob_message(wire::BlobUnknown{.id = id_});
  const auto head = wire::write_blob_message(wire::BlobPiece{.id = id_, .offset = 0, .total_bytes = 100});
  const auto bytes = filled(100, 1);
  net::OutgoingPart piece[] = {{.bytes = head, .release = nullptr}, {.bytes = bytes, .release = nullptr}};
  ASSERT_TRUE(stranger.socket().send(piece));
  ASSERT_TRUE(stranger.socket().send(unknown));
  // The worker has taken both when it answers what comes behind them.
  const auto hello = wire::write_to_worker(
      {.message = {.kind = ToWorker::Kind::kHello, .trainer_id = other_run_.id, .link = 2, .stamp = 1},
       .offer = wire::SealOffer{.ciphers = net::fast_ciphers()},
       .secret = other_run_.secret});
  ASSERT_TRUE(stranger.socket().send(hello));
  for (int answers = 0; answers < 2; ++answers) {
    net::ClientReceipt receipt;
    ASSERT_TRUE(trainer_->serve_until([&] { return stranger.socket().try_receive(receipt).value(); }));
  }
  trainer_->requests_to_ignore = 0;
  trainer_->answer(0);
  EXPECT_EQ(error_code(), std::nullopt);
  EXPECT_EQ(got_, trainer_->blobs[id_]);
}

TEST_F(BlobTransfer, OneAboveTheCapIsRefused) {
  auto small = options();
  small.blob_bytes_max = 1000;
  serve_blob(std::move(small));
  trainer_->blobs[id_] = random_bytes(1001);
  trainer_->ask(0, {.blobs = {id_}});
  trainer_->answer(0);
  EXPECT_EQ(error_code(), Errc::kTooLarge);
  EXPECT_NE(error_->message.find("PENSTOCK_JOB_BYTES"), std::string::npos);
}

TEST_F(BlobTransfer, NobodyWaitsForTheBlobOfABatchThatIsNotWanted) {
  serve_blob(options());
  trainer_->requests_to_ignore = 1'000'000;
  trainer_->ask(0, {.blobs = {id_}});
  ASSERT_TRUE(trainer_->serve_until([&] { return trainer_->requests_to_ignore < 1'000'000; }));
  trainer_->forget(0);
  trainer_->requests_to_ignore = 0;
  trainer_->blobs[id_] = random_bytes(10);
  trainer_->ask(1, {.blobs = {id_}});
  trainer_->answer(1);
  EXPECT_EQ(error_code(), Errc::kClosed);
  EXPECT_EQ(got_, trainer_->blobs[id_]);
}

// ---- The controller

class RegisteredWorker : public PoolServerTest {
 protected:
  RegisteredWorker() : controller_(serve({.allowed_roles = {Role::kWorker}, .limits = net::control_limits()})) {}

  PoolServerOptions registered() const {
    auto registered = options();
    registered.controller = controller_->endpoint();
    registered.about = "a worker";
    return registered;
  }
  wire::ControlMessage next_report() {
    auto receipt = next_message(*controller_);
    EXPECT_TRUE(receipt);
    if (!receipt) return wire::Deregistration{};
    routing_id_ = receipt->peer.routing_id;
    return wire::parse_control(receipt->parts.at(0).bytes()).value();
  }
  void say(const wire::ControlMessage& message) {
    ASSERT_TRUE(controller_->send(routing_id_, wire::write_control(message)));
  }
  // Gives the worker, which must have reported, to this trainer alone.
  void give(const net::RunId& run) {
    say(wire::WorkerOrders{.incarnation = 1,
                           .controller_id = 1,
                           .view = ++view_,
                           .is_settled = true,
                           .trainer_id = run.id,
                           .is_to_part = true});
  }

  std::unique_ptr<net::ServerSocket> controller_;
  std::string routing_id_;
  uint64_t view_ = 0;
};

// A trainer whose quota is 0 took the workers of others by greeting them.
TEST_F(RegisteredWorker, ServesOnlyTheTrainerThatItsControllerNames) {
  start(registered());
  serve_batches();
  next_report();
  give(other_run_);
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->said.contains(ToTrainer::Kind::kRefused); }));
  EXPECT_EQ(trainer->refusal, "the pool's controller has not assigned it to this trainer yet");
  give(run_);
  expect_counting(trainer->answer(0), 100, 0);
  give(other_run_);
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().open_count() == 0; }));
  const auto other = train(other_run_);
  other->ask(0, {.indices = {100}});
  expect_counting(other->answer(0), 100, 0);
}

TEST_F(RegisteredWorker, ReportsWhereItIsAndForWhomItWorks) {
  start(registered());
  serve_batches();
  const auto first = std::get<wire::WorkerReport>(next_report());
  EXPECT_EQ(first.worker_id, server_->worker_id());
  EXPECT_EQ(first.incarnation, 1u);
  EXPECT_EQ(first.endpoint, server_->endpoint().text());
  EXPECT_EQ(first.about, "a worker");
  EXPECT_EQ(first.trainer_id, 0u);
  give(run_);
  const auto trainer = train();
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().open_count() == 1; }));
  auto report = first;
  while (report.trainer_id == 0) report = std::get<wire::WorkerReport>(next_report());
  EXPECT_EQ(report.trainer_id, run_.id);
}

TEST_F(RegisteredWorker, ReportsWhyItDeclinedTheLastTrainer) {
  start(registered());
  work_by([](PoolServer& server, const PoolWork&) { server.decline("no module named 'that'"); });
  next_report();
  give(run_);
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->said.contains(ToTrainer::Kind::kDeclined); }));
  wire::WorkerReport report;
  while (report.declined.empty()) report = std::get<wire::WorkerReport>(next_report());
  EXPECT_EQ(report.declined, (std::vector<uint64_t>{run_.id}));
  EXPECT_EQ(report.decline_reason, "no module named 'that'");
}

TEST_F(RegisteredWorker, OneThatLostItsLeaseForgetsItsTrainerAndGoesOnAsAnother) {
  start(registered());
  serve_batches();
  next_report();
  give(run_);
  const auto trainer = train();
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().open_count() == 1; }));
  auto report = std::get<wire::WorkerReport>(next_report());
  say(wire::WorkerOrders{.incarnation = 1, .is_fenced = true});
  while (report.incarnation == 1) report = std::get<wire::WorkerReport>(next_report());
  EXPECT_EQ(report.incarnation, 2u);
  EXPECT_EQ(report.trainer_id, 0u);
}

TEST_F(RegisteredWorker, OneThatIsToldToDrainSaysFarewell) {
  start(registered());
  serve_batches();
  next_report();
  say(wire::WorkerOrders{.incarnation = 1, .is_to_drain = true});
  wire::ControlMessage message;
  do {
    message = next_report();
  } while (std::holds_alternative<wire::WorkerReport>(message));
  const auto deregistration = std::get<wire::Deregistration>(message);
  EXPECT_TRUE(deregistration.is_worker);
  EXPECT_EQ(deregistration.id, server_->worker_id());
  EXPECT_EQ(net::run_id_of(keys_.public_key(Role::kWorker), deregistration.secret), deregistration.id);
  EXPECT_EQ(ended_.get(), (Fault{Errc::kClosed, "this worker was drained"}));
  EXPECT_EQ(server_->standing(), (Standing{.drain_cause = Standing::DrainCause::kOrder}));
}

TEST_F(RegisteredWorker, OneThatIsRefusedSaysWhy) {
  start(registered());
  serve_batches();
  next_report();
  say(wire::Refusal{"another version"});
  const Fault error = ended_.get();
  EXPECT_EQ(error.code, Errc::kFailed);
  EXPECT_NE(error.message.find("another version"), std::string::npos);
}

TEST_F(RegisteredWorker, OneWhoseControllerIsSilentEndsOnceItHasNothingToDo) {
  auto impatient = registered();
  impatient.patience = std::chrono::milliseconds(300);
  start(std::move(impatient));
  serve_batches();
  next_report();
  give(run_);
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  const auto begun_at = Clock::now();
  ASSERT_TRUE(trainer->serve_until([&] { return Clock::now() - begun_at > std::chrono::milliseconds(700); }));
  expect_counting(trainer->answer(0), 100, 0);
  trainer->ask(1, {.indices = {100}});
  expect_counting(trainer->answer(1), 100, 1);
  trainer->session().set_roster({}, clock_now());
  const Fault error = ended_.get();
  EXPECT_EQ(error.code, Errc::kFailed);
  EXPECT_NE(error.message.find("has not answered"), std::string::npos) << error.message;
}

TEST_F(RegisteredWorker, OneThatAnEngineHasStartedEndsAlsoWhereNoControllerEverAnswers) {
  auto impatient = registered();
  impatient.patience = std::chrono::milliseconds(300);
  impatient.name = "engine-1";
  start(std::move(impatient));
  serve_batches();
  const Fault error = ended_.get();
  EXPECT_EQ(error.code, Errc::kFailed);
  EXPECT_NE(error.message.find("has not answered"), std::string::npos) << error.message;
}

// ---- The supervisor

class SupervisedWorker : public RegisteredWorker {
 protected:
  PoolServerOptions supervised() const {
    auto supervised = registered();
    supervised.supervisor = exit_line_writer(pipe_.write_fd());
    return supervised;
  }

  ExitPipe pipe_ = ExitPipe::open().value();
};

TEST_F(SupervisedWorker, SaysThatItServesAndThatItWasDrained) {
  start(supervised());
  serve_batches();
  EXPECT_TRUE(pipe_.read());
  EXPECT_TRUE(pipe_.has_served());
  EXPECT_EQ(pipe_.end(), std::nullopt);
  next_report();
  say(wire::WorkerOrders{.incarnation = 1, .is_to_drain = true});
  ended_.get();
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kDrained);
  EXPECT_EQ(pipe_.text(), "");
}

TEST_F(SupervisedWorker, SaysThatAnotherWouldBeRefusedAsWell) {
  start(supervised());
  serve_batches();
  next_report();
  say(wire::Refusal{"another version"});
  ended_.get();
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kUseless);
}

// A worker without a descriptor left was lost for good, and its trainer took it for one that its batch had killed.
TEST_F(SupervisedWorker, OneThatCanMakeNothingMoreHandsItsBatchBackAndIsReplaced) {
  start(supervised());
  work_by([](PoolServer& server, const PoolWork&) { server.leave("no descriptor is left"); });
  next_report();
  give(run_);
  const auto trainer = train();
  trainer->ask(0, {.indices = {100}});
  ASSERT_TRUE(
      trainer->serve_until([&] { return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_EQ(ended_.get(), (Fault{Errc::kClosed, "this worker was drained"}));
  EXPECT_EQ(server_->standing().drain_cause, Standing::DrainCause::kShortage);
  ASSERT_TRUE(trainer->serve_until([&] { return trainer->session().dispatch().waiting_count() == 1; }));
  EXPECT_TRUE(trainer->said.contains(ToTrainer::Kind::kHandedBack));
  EXPECT_EQ(trainer->session().dispatch().deadliest(), std::nullopt);
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kFailed);
  EXPECT_EQ(pipe_.text(), "no descriptor is left");
}

// Two results of one piece of work ended the worker: a dataset's alarm had raised as the first was sent.
TEST_F(PoolServerTest, SecondResultOfOnePieceOfWorkIsDropped) {
  start(options());
  work_by([this](PoolServer& server, const PoolWork& work) {
    answer(server, work);
    EXPECT_TRUE(server.answer_error(work, {.type_name = "TimeoutError", .text = "too late"}, {}));
  });
  const auto trainer = train();
  for (uint64_t sequence = 0; sequence < 3; ++sequence) {
    trainer->ask(sequence, {.indices = {100}});
    expect_counting(trainer->answer(sequence), 100, static_cast<int>(sequence));
  }
}

// A worker in a process of its own, which it may end, and its trainer, which has asked for a batch that hangs.
class LoneWorker : net::PoolSockets {
 public:
  LoneWorker(const ExitPipe& pipe, AbandonedGrace abandoned_grace, Duration drain_grace) {
    PoolServerOptions options{
        .bind = {.host = "127.0.0.1", .port = 0}, .keys = keys_.ring(Role::kWorker), .arena_bytes = kMegabyte};
    options.numerics.fill(1);  // not computed in a process that was forked
    options.supervisor = exit_line_writer(pipe.write_fd());
    options.abandoned_grace = abandoned_grace;
    options.drain_grace = drain_grace;
    server_ = PoolServer::start(std::move(options)).value();
    std::thread([server = server_.get()] {
      static_cast<void>(server->next(Clock::now() + kPatience));
      for (;;) ::pause();
    }).detach();
    auto client = connect(server_->endpoint(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kWorker));
    expect_connected(*client);
    trainer_ = std::make_unique<PoolTrainer>(context_, *resolver_, std::move(client),
                                             net::draw_run_id(keys_.public_key(Role::kTrainer)));
    trainer_->begin(server_->worker_id());
    trainer_->ask(0, {.indices = {100}});
  }

  PoolServer& server() { return *server_; }
  PoolTrainer& trainer() { return *trainer_; }
  bool has_begun() {
    return trainer_->serve_until([this] { return trainer_->said.contains(ToTrainer::Kind::kStarted); });
  }
  // Serves until the process has ended; what is wrong if it has not.
  std::string serve_to_the_end() {
    static_cast<void>(trainer_->serve_until([] { return false; }));
    return "the process lives on";
  }
  // Serves until pongs have come several kShortGrace later, as they do every half a second; what is wrong if none has.
  std::string serve_for_pongs() {
    for (int count = 0; count < 2; ++count) {
      trainer_->said.erase(ToTrainer::Kind::kPong);
      if (!trainer_->serve_until([this] { return trainer_->said.contains(ToTrainer::Kind::kPong); }))
        return "no pong came";
    }
    return "";
  }

 private:
  std::unique_ptr<PoolServer> server_;
  std::unique_ptr<PoolTrainer> trainer_;
};

constexpr Duration kShortGrace = std::chrono::milliseconds(100);
constexpr Duration kLongGrace = std::chrono::hours(1);
constexpr AbandonedGrace kShortAbandonedGrace{.first_batch = kShortGrace, .later = kShortGrace};

// Its job had ended, and the worker was called free and given to the next one, which waited for ever.
TEST(LostWorker, EndsItsProcessAtABatchThatNobodyWants) {
  ExitPipe pipe = ExitPipe::open().value();
  test::ChildProcess child([&]() -> std::string {
    auto& worker = *new LoneWorker(pipe, kShortAbandonedGrace, kLongGrace);  // which ends with the process
    if (!worker.has_begun()) return "nothing was begun";
    worker.trainer().forget(0);
    return worker.serve_to_the_end();
  });
  EXPECT_EQ(child.join(), "ended with status 1");
  EXPECT_TRUE(pipe.read());
  EXPECT_EQ(pipe.end(), ExitWord::kFailed);
  EXPECT_EQ(pipe.text().rfind("it worked on batch 0 of epoch 1 for ", 0), 0u) << pipe.text();
  EXPECT_NE(pipe.text().find("although it was no longer needed"), std::string::npos) << pipe.text();
}

TEST(LostWorker, EndsItsProcessWhereALeavingOneIsTooLate) {
  ExitPipe pipe = ExitPipe::open().value();
  test::ChildProcess child([&]() -> std::string {
    auto& worker = *new LoneWorker(pipe, {.first_batch = kLongGrace, .later = kLongGrace}, kShortGrace);
    if (!worker.has_begun()) return "nothing was begun";
    worker.server().drain();
    return worker.serve_to_the_end();
  });
  EXPECT_EQ(child.join(), "ended with status 1");
  EXPECT_TRUE(pipe.read());
  EXPECT_EQ(pipe.end(), ExitWord::kDrained) << "it was drained, and is not to be started again";
  EXPECT_NE(pipe.text().find("it was still making batch 0 of epoch 1"), std::string::npos) << pipe.text();
}

TEST(LostWorker, IsNoneThatTakesLongForABatchThatIsWanted) {
  const ExitPipe pipe = ExitPipe::open().value();
  EXPECT_EQ(test::in_child([&]() -> std::string {
              auto& worker = *new LoneWorker(pipe, kShortAbandonedGrace, kShortGrace);
              if (!worker.has_begun()) return "nothing was begun";
              return worker.serve_for_pongs();
            }),
            "");
}

// A dataset whose first sample takes a minute lost each worker whose first batch another one had made.
TEST(LostWorker, IsNoneThatTakesLongForItsFirstBatchAlsoWhereNobodyWantsThat) {
  const ExitPipe pipe = ExitPipe::open().value();
  EXPECT_EQ(test::in_child([&]() -> std::string {
              auto& worker = *new LoneWorker(pipe, {.first_batch = kLongGrace, .later = kShortGrace}, kLongGrace);
              if (!worker.has_begun()) return "nothing was begun";
              worker.trainer().forget(0);
              return worker.serve_for_pongs();
            }),
            "");
}

TEST_F(PoolServerTest, AKeyOfAnotherRoleIsNotLetIn) {
  start(options());
  const auto client = connect(server_->endpoint(), keys_.pair(Role::kOperator), keys_.public_key(Role::kWorker));
  expect_refused(*client, "role");
}

TEST_F(PoolServerTest, APortThatIsTakenIsRefused) {
  start(options());
  auto second = options();
  second.bind = server_->endpoint();
  const auto refused = PoolServer::start(std::move(second));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find(server_->endpoint().text()), std::string::npos);
}

}  // namespace
}  // namespace penstock::worker
