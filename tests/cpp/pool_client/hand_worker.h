// SPDX-License-Identifier: Apache-2.0
#pragma once
// A pool's worker by hand: the live WorkerSession and socket, and batches that a test makes and may send wrongly.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "net/server_socket.h"
#include "session/worker_session.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/frame.h"
#include "wire/nest.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

using wire::BatchKey;
using wire::ToTrainer;

// One tensor of bytes that count up from the sequence, and its record behind it.
struct MadeBatch {
  std::vector<std::byte> payload;
  uint32_t record_bytes = 0;
};

inline MadeBatch count_up(uint64_t bytes, uint64_t first) {
  wire::NestWriter nest;
  nest.tensor(0);
  const int64_t size = static_cast<int64_t>(bytes);
  wire::Frame frame;
  frame.tensors.push_back({.dtype = 0, .offset = 0, .bytes = bytes, .shape = {size}, .strides = {1}});
  frame.nest = nest.view();
  frame.payload_bytes = align_up(bytes, wire::kPayloadAlignment);
  MadeBatch made;
  made.payload.resize(frame.payload_bytes);
  const uint64_t period = std::min<uint64_t>(bytes, 256);
  for (uint64_t place = 0; place < period; ++place) made.payload[place] = static_cast<std::byte>(first + place);
  for (uint64_t done = period; done < bytes; done *= 2)
    std::memcpy(&made.payload[done], made.payload.data(), std::min(done, bytes - done));
  const auto record = wire::write_frame(frame);
  made.record_bytes = static_cast<uint32_t>(record.size());
  made.payload.insert(made.payload.end(), record.begin(), record.end());
  return made;
}

struct HandWorkerOptions {
  uint64_t worker_id = 5;
  uint64_t batch_bytes = 1000;
  uint64_t piece_bytes = 300;
  std::optional<uint64_t> loses_piece_of{};  // once, of this sequence
  uint64_t claims_first = 0;                 // bytes of each batch, of which it sends one piece before the batch
  std::optional<uint64_t> ends_at{};         // answers that the shard has no more, from this sequence on
  bool ends_recalls = false;                 // the same, to each recall
  bool declines = false;
  bool forgets_nobody = false;                         // waits for a silent trainer however long that takes
  bool works_after_ping = false;                       // makes no batch before it has been pinged
  std::function<bool()> may_work{};                    // makes no batch before this is true
  std::function<bool(uint64_t)> may_send_pieces_of{};  // sends none of a sequence, or later, before this is true
  std::optional<uint64_t> dies_of{};                   // its process ends whenever it makes this sequence
  int refusals_to_hello = 0;                           // each with another reason
  std::optional<wire::BlobId> wishes{};                // asks for it before the first batch
  std::function<MadeBatch(uint64_t sequence)> make{};  // of each batch; without one its bytes count up
  std::string handover{};                              // where it listens to hand batches over as slabs
  Numerics numerics{};                                 // of its kernels
  uint64_t dataset_size = wire::kSizeUnknown;          // that it tells with each batch
  // Writes to a message, or to a wish for a blob, before it is sent.
  std::function<void(const ToTrainer&, std::span<std::byte>)> alter_message{};
  std::function<void(std::span<std::byte>)> alter_blob_request{};
};

// Runs on a thread of its own until it is destroyed. `Data` is a DataServer, or one by hand.
template <typename Data>
class HandWorkerOf {
 public:
  using Options = HandWorkerOptions;

  HandWorkerOf(std::unique_ptr<net::ServerSocket> server, std::unique_ptr<Data> data, Options options)
      : options_(std::move(options)),
        server_(std::move(server)),
        data_(std::move(data)),
        thread_([this](const std::stop_token& stop) { run(stop); }) {}

  std::string blob() const { return blob_; }  // once the worker is gone
  std::vector<std::string> starts() const { return starts_; }
  int hello_count() const { return hello_count_.load(); }
  void end() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      net::ServerReceipt receipt;
      while (server_->try_receive(receipt).value()) take(receipt);
      EXPECT_TRUE(data_->receive());
      if (!options_.forgets_nobody) desk_.tick(clock_now());
      work();
      send_all();
      send_pieces();
      const net::Waitable waitables[] = {server_->waitable(), data_->waitable()};
      static_cast<void>(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(pieces_.empty() ? 10 : 1)));
    }
    data_.reset();  // on the thread that used it
    server_.reset();
  }

  void take(const net::ServerReceipt& receipt) {
    peer_ = receipt.peer.routing_id;
    const auto part = receipt.parts.front().bytes();
    if (wire::is_blob_message(part) && receipt.parts.size() == 1) return;  // the trainer does not have it
    if (wire::is_blob_message(part)) {
      const auto bytes = receipt.parts[1].bytes();
      blob_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      const auto piece = std::get<wire::BlobPiece>(wire::parse_blob_message(part, bytes.size()).value());
      if (blob_.size() < piece.total_bytes) wish();
      return;
    }
    const auto request = wire::parse_to_worker(part).value();
    if (request.offer) offer_ = *request.offer;
    if (request.message.kind == wire::ToWorker::Kind::kHello) {
      hello_count_.fetch_add(1);
      refuse(request.message.link);
      if (listener_) open_handover(request.message);
    }
    if (request.message.kind == wire::ToWorker::Kind::kPing) was_pinged_ = true;
    desk_.receive(request.message, clock_now());
    if (request.message.is_lane_start)
      starts_.emplace_back(reinterpret_cast<const char*>(request.state.data()), request.state.size());
    if (request.message.kind == wire::ToWorker::Kind::kRequest && options_.declines) desk_.decline();
    if (request.message.kind == wire::ToWorker::Kind::kRequest && options_.wishes && blob_.empty()) wish();
  }

  // The trainer has connected for the link that it greets on, unless it has given up slabs. It may have connected for
  // later ones, too, where this worker comes late to its first greeting.
  void open_handover(const wire::ToWorker& hello) {
    channel_.reset();
    while (auto accepted = listener_->accept()) {
      const auto named = accepted.value().receive(std::chrono::steady_clock::now() + std::chrono::seconds(30));
      const auto link = named ? named.value().as<wire::HandoverHello>() : std::nullopt;
      if (link) newcomers_.insert_or_assign({link->trainer_id, link->link}, std::move(accepted).value());
    }
    auto newcomer = newcomers_.extract({hello.trainer_id, hello.link});
    if (!newcomer) return;
    channel_.emplace(std::move(newcomer.mapped()));
    arena_ = shm::Arena::create({.slab_bytes = 1 << 16, .slab_count = 8}, hello.link).value();
    const wire::HandoverArena passed{.arena_id = hello.link};
    const int fd = arena_->fd();
    if (!channel_->send_record(passed, {&fd, 1})) channel_.reset();  // the trainer is at another link already
  }

  void wish() {
    auto bytes = wire::write_blob_message(wire::BlobRequest{.id = *options_.wishes, .offset = blob_.size()});
    if (options_.alter_blob_request) options_.alter_blob_request(bytes);
    static_cast<void>(server_->send(peer_, bytes));
  }

  void refuse(uint32_t link) {
    for (int count = 0; count < options_.refusals_to_hello; ++count) {
      const std::string reason = "reason " + std::to_string(count);
      send({.message = {.kind = ToTrainer::Kind::kDeclined, .link = link},
            .worker_id = options_.worker_id,
            .incarnation = 1,
            .body = std::as_bytes(std::span(reason))});
    }
  }

  void work() {
    if (options_.works_after_ping && !was_pinged_) return;
    const auto begun = options_.may_work && !options_.may_work() ? std::nullopt : desk_.begin();
    if (!begun) return;
    if (begun->key.sequence == options_.dies_of) return desk_.lose_process(desk_.trainer_id());
    desk_.finished();
  }

  void send_all() {
    for (const auto& command : desk_.take_commands()) {
      if (command.kind != session::WorkerSession::Command::Kind::kSend) {
        std::erase_if(pieces_, [&](const Piece& piece) { return piece.head.key == command.key; });
        continue;
      }
      wire::PoolAnswer answer{.message = command.message, .worker_id = options_.worker_id, .incarnation = 1};
      static constexpr std::string_view kReason = "another torch";
      static constexpr std::string_view kEnd = "ended with exit code 3\x1b[2J";
      if (answer.message.kind == ToTrainer::Kind::kWelcome) {
        pieces_.clear();
        answer.grant = data_->begin(command.trainer_id, answer.message.link, offer_).value();
        answer.grant->data_endpoint = data_endpoint_;
        answer.grant->numerics = options_.numerics;
      }
      if (answer.message.kind == ToTrainer::Kind::kDeclined) answer.body = std::as_bytes(std::span(kReason));
      if (answer.message.kind == ToTrainer::Kind::kDied) answer.body = std::as_bytes(std::span(kEnd));
      if (answer.message.kind == ToTrainer::Kind::kAnswer) {
        send_answer(answer);
      } else {
        send(answer);
      }
    }
  }

  void send_answer(wire::PoolAnswer answer) {
    const wire::BatchKey key = answer.message.key;
    const bool is_end =
        wire::is_recall(key) ? options_.ends_recalls : options_.ends_at && key.sequence >= *options_.ends_at;
    if (is_end) {
      answer.kind = wire::AnswerKind::kEnd;
      return send(answer);
    }
    const auto made = std::make_shared<const MadeBatch>(options_.make ? options_.make(key.sequence)
                                                                      : count_up(options_.batch_bytes, key.sequence));
    const uint64_t size = made->payload.size();
    static constexpr std::string_view kState = "after it";
    answer.kind = wire::AnswerKind::kBatch;
    answer.payload_bytes = size;
    answer.record_bytes = made->record_bytes;
    answer.dataset_size = options_.dataset_size;
    answer.state = std::as_bytes(std::span(kState));
    if (channel_) {
      const uint32_t slab_index = arena_->try_acquire().value();
      EXPECT_TRUE(arena_->reserve(slab_index, arena_->slab_bytes()));
      std::memcpy(arena_->slab(slab_index), made->payload.data(), size);
      answer.place = {.arena_id = arena_->id(),
                      .slab_index = slab_index,
                      .generation = arena_->generation(slab_index),
                      .slab_bytes = arena_->slab_bytes()};
      return send(answer);
    }
    if (options_.claims_first > 0) pieces_.push_back({made, {.key = key, .payload_bytes = options_.claims_first}, 1});
    for (uint64_t offset = 0; offset < size; offset += options_.piece_bytes) {
      if (offset > 0 && options_.loses_piece_of == key.sequence) {
        options_.loses_piece_of.reset();
        continue;
      }
      pieces_.push_back({made,
                         {.key = key, .payload_bytes = size, .payload_offset = offset},
                         std::min<uint64_t>(options_.piece_bytes, size - offset)});
    }
    send(answer);
  }

  void send_pieces() {
    while (!pieces_.empty() && data_->has_room()) {
      Piece& piece = pieces_.front();
      if (options_.may_send_pieces_of && !options_.may_send_pieces_of(piece.head.key.sequence)) return;
      const auto bytes = std::span(piece.made->payload).subspan(piece.head.payload_offset, piece.size);
      static_cast<void>(data_->send(piece.head, bytes));  // the trainer may have ended the link
      pieces_.pop_front();
    }
  }

  void send(const wire::PoolAnswer& answer) {
    auto bytes = wire::write_to_trainer(answer);
    if (options_.alter_message) options_.alter_message(answer.message, bytes);
    static_cast<void>(server_->send(peer_, bytes));
  }

  struct Piece {
    std::shared_ptr<const MadeBatch> made;
    wire::PieceHead head;
    uint64_t size;
  };

  Options options_;
  std::unique_ptr<net::ServerSocket> server_;
  std::unique_ptr<Data> data_;
  const std::string data_endpoint_ = data_->endpoint().text();
  wire::SealOffer offer_;
  std::deque<Piece> pieces_;
  session::WorkerSession desk_;
  std::optional<shm::ChannelListener> listener_ =
      options_.handover.empty() ? std::nullopt : std::optional(shm::ChannelListener::bind(options_.handover).value());
  std::map<std::pair<uint64_t, uint32_t>, shm::Channel> newcomers_;  // by their trainer and link
  std::optional<shm::Channel> channel_;                              // of the link in force, where it hands slabs over
  std::shared_ptr<shm::Arena> arena_;
  bool was_pinged_ = false;
  std::string peer_;
  std::string blob_;
  std::vector<std::string> starts_;
  std::atomic<int> hello_count_{0};
  std::jthread thread_;
};
using HandWorker = HandWorkerOf<net::DataServer>;

}  // namespace penstock::pool_client
