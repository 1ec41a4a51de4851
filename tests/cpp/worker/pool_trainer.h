// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer by hand: the pure half of its protocol (session/pool_session.h) over a real connection to one worker. It
// puts batches together from their pieces and hands out blobs.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "net/client_socket.h"
#include "net/socket.h"
#include "session/pool_session.h"
#include "wire/blob_record.h"
#include "wire/pool_record.h"

namespace penstock::worker {

class PoolTrainer {
 public:
  using Bytes = std::vector<std::byte>;
  struct Answer {
    wire::AnswerKind kind = wire::AnswerKind::kNone;
    uint8_t flags = 0;
    uint32_t record_bytes = 0;
    wire::WorkerMeter meter{};
    uint32_t sample_count = 0;
    Bytes payload;
    std::string text;
    Bytes state;
    uint32_t piece_count = 0;
  };
  // The parts of a request beside the session's message.
  struct Content {
    std::vector<int64_t> indices = {};
    Bytes seeds = {};
    Bytes state = {};
    std::vector<wire::BlobId> blobs = {};
    uint64_t epoch_seed = 0;
  };

  PoolTrainer(net::SocketContext& context, net::Resolver& resolver, std::unique_ptr<net::ClientSocket> socket,
              const net::RunId& run)
      : context_(context),
        resolver_(resolver),
        run_(run),
        session_({.trainer_id = run.id, .credit_bytes = uint64_t{1} << 30, .dispatch = {}}),
        socket_(std::move(socket)) {}

  void begin(uint64_t worker_id) {
    worker_id_ = worker_id;
    const wire::RosterEntry entry{.worker_id = worker_id, .incarnation = 1};
    session_.set_roster({&entry, 1}, clock_now());
    carry_out();
  }

  void ask(uint64_t sequence, Content content, wire::Lane lane = wire::kNoLane) {
    contents_[key(sequence)] = std::move(content);
    session_.ask(key(sequence), lane, clock_now());
    carry_out();
  }
  void forget(uint64_t sequence) {
    session_.forget(key(sequence), clock_now());
    carry_out();
  }

  // Serves until `is_done`, which may take a message: it is not called again once it has returned true. False if that
  // takes too long.
  bool serve_until(const std::function<bool()>& is_done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (bool is_over = is_done(); !is_over;) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      while (socket_->try_event()) {
      }
      net::ClientReceipt receipt;
      bool has_received = false;
      while (!is_over && socket_->try_receive(receipt).value()) {
        take(receipt);
        has_received = true;
        is_over = is_done();
      }
      while (!is_over && take_piece()) {
        has_received = true;
        is_over = is_done();
      }
      session_.tick(clock_now());
      carry_out();
      is_over = is_over || is_done();
      if (has_received || is_over) continue;
      std::vector<net::Waitable> waitables;
      for (const net::Waitable& waitable : socket_->waitables()) waitables.push_back(waitable);
      if (data_) {
        for (const net::Waitable& waitable : data_->waitables()) waitables.push_back(waitable);
      }
      EXPECT_TRUE(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(20)));
    }
    return true;
  }
  const Answer& answer(uint64_t sequence) {
    EXPECT_TRUE(serve_until([&] { return answers_.contains(sequence); })) << "batch " << sequence << " did not come";
    return answers_[sequence];
  }
  bool has(uint64_t sequence) const { return answers_.contains(sequence); }

  session::PoolSession& session() { return session_; }
  std::map<wire::BlobId, Bytes> blobs;
  uint64_t blob_piece_bytes = wire::kBlobPieceBytesMax;
  int requests_to_ignore = 0;
  int answers_to_lose = 0;
  uint8_t ciphers = net::fast_ciphers();
  std::string refusal;  // the worker's last message
  std::set<wire::ToTrainer::Kind> said;

 private:
  using ToTrainer = wire::ToTrainer;
  using ToWorker = wire::ToWorker;

  static wire::BatchKey key(uint64_t sequence) { return {.epoch = 1, .sequence = sequence}; }

  void take(const net::ClientReceipt& receipt) {
    ASSERT_FALSE(receipt.parts.empty()) << receipt.offence;
    const auto first = receipt.parts[0].bytes();
    if (wire::is_blob_message(first)) {
      const auto bytes = receipt.parts.size() > 1 ? receipt.parts[1].bytes().size() : 0;
      return hand_out(wire::parse_blob_message(first, bytes).value());
    }
    ASSERT_EQ(receipt.parts.size(), 1u);
    const auto parsed = wire::parse_to_trainer(first);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().worker_id, worker_id_);
    said.insert(parsed.value().message.kind);
    waiting_.emplace_back(first.begin(), first.end());
    take_waiting();
  }

  // Messages keep their order behind an answer whose pieces are not there yet.
  void take_waiting() {
    while (!waiting_.empty()) {
      const wire::PoolAnswer answer = wire::parse_to_trainer(waiting_.front()).value();
      const uint64_t have = pending_[answer.message.key.sequence].payload.size();
      if (answer.message.link == link_ && have < answer.payload_bytes) return;
      const Bytes held = std::move(waiting_.front());
      waiting_.pop_front();
      take_answer(wire::parse_to_trainer(held).value());
    }
  }

  void take_answer(const wire::PoolAnswer& answer) {
    if (answer.grant && answer.message.link == link_) {
      data_ =
          net::DataClient::connect(context_, resolver_, {.trainer_id = run_.id, .worker_id = worker_id_, .link = link_},
                                   offer_, *answer.grant)
              .value();
    }
    if (!answer.body.empty()) refusal.assign(reinterpret_cast<const char*>(answer.body.data()), answer.body.size());
    if (answer.message.kind == ToTrainer::Kind::kAnswer && answers_to_lose > 0) {
      --answers_to_lose;
      return;
    }
    Answer& pending = pending_[answer.message.key.sequence];
    const uint64_t bytes = pending.payload.size();
    if (session_.receive(worker_id_, answer.message, bytes, clock_now())) {
      EXPECT_EQ(answer.payload_bytes, bytes);
      pending.kind = answer.kind;
      pending.flags = answer.flags;
      pending.record_bytes = answer.record_bytes;
      pending.meter = answer.meter;
      pending.sample_count = answer.sample_count;
      pending.text.assign(reinterpret_cast<const char*>(answer.body.data()), answer.body.size());
      pending.state.assign(answer.state.begin(), answer.state.end());
      answers_[answer.message.key.sequence] = std::move(pending);
    }
    carry_out();
  }

  bool take_piece() {
    if (!data_) return false;
    while (data_->try_event()) {
    }
    const auto outcome = data_->try_receive();
    if (outcome == net::DataClient::Outcome::kNothing) return false;
    EXPECT_EQ(outcome, net::DataClient::Outcome::kPiece) << data_->fault();
    const wire::PieceHead head = data_->piece().head;
    Bytes bytes(data_->piece().size());
    EXPECT_TRUE(data_->open(bytes)) << data_->fault();
    session_.heard(worker_id_, link_, clock_now());
    Answer& pending = pending_[head.key.sequence];
    if (head.payload_offset == 0) pending = {};
    EXPECT_EQ(head.payload_offset, pending.payload.size());
    pending.payload.insert(pending.payload.end(), bytes.begin(), bytes.end());
    ++pending.piece_count;
    take_waiting();
    return true;
  }

  void hand_out(const wire::BlobMessage& message) {
    const auto wish = std::get<wire::BlobRequest>(message);
    if (requests_to_ignore > 0) {
      --requests_to_ignore;
      return;
    }
    const auto found = blobs.find(wish.id);
    if (found == blobs.end()) {
      EXPECT_TRUE(socket_->send(wire::write_blob_message(wire::BlobUnknown{.id = wish.id})));
      return;
    }
    const Bytes& blob = found->second;
    ASSERT_LT(wish.offset, blob.size());
    const auto head =
        wire::write_blob_message(wire::BlobPiece{.id = wish.id, .offset = wish.offset, .total_bytes = blob.size()});
    const auto bytes =
        std::span(blob).subspan(wish.offset, std::min<uint64_t>(blob_piece_bytes, blob.size() - wish.offset));
    net::OutgoingPart parts[] = {{.bytes = head, .release = nullptr}, {.bytes = bytes, .release = nullptr}};
    EXPECT_TRUE(socket_->send(parts));
  }

  void carry_out() {
    for (const auto& command : session_.take_commands()) {
      if (command.kind != session::PoolSession::Command::Kind::kSend) continue;
      wire::PoolRequest request{.message = command.message};
      if (command.message.kind == ToWorker::Kind::kHello) {
        link_ = command.message.link;
        offer_ = {.ciphers = ciphers, .nonce = net::draw_seal_nonce().value()};
        request.offer = offer_;
        request.secret = run_.secret;
        data_.reset();
        waiting_.clear();
      }
      if (command.message.kind == ToWorker::Kind::kRequest) {
        const Content& content = contents_.at(command.message.key);
        request.index_kind = wire::IndexKind::kIntegers;
        request.epoch_seed = content.epoch_seed;
        request.indices = std::as_bytes(std::span(content.indices));
        request.seeds = content.seeds;
        if (command.message.is_lane_start) request.state = content.state;
        request.blobs = content.blobs;
      }
      EXPECT_TRUE(socket_->send(wire::write_to_worker(request)));
    }
  }

  net::SocketContext& context_;
  net::Resolver& resolver_;
  const net::RunId run_;
  uint64_t worker_id_ = 0;
  uint32_t link_ = 0;
  wire::SealOffer offer_;
  std::unique_ptr<net::DataClient> data_;
  std::deque<Bytes> waiting_;
  session::PoolSession session_;
  std::unique_ptr<net::ClientSocket> socket_;
  std::map<wire::BatchKey, Content> contents_;
  std::map<uint64_t, Answer> pending_;
  std::map<uint64_t, Answer> answers_;
};

}  // namespace penstock::worker
