// SPDX-License-Identifier: Apache-2.0
#include "worker/answer_outbox.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace penstock::worker {

using wire::kMessageBytesMax;
using wire::kPieceBytesMax;
using wire::kPoolHeadBytes;
using wire::ToTrainer;

namespace {

// How much of the rest of a batch goes into the next message. The last piece travels with the answer itself, whose
// first part, with the dataset's state, takes some of the room of a message.
uint64_t piece_bytes(uint64_t left_bytes, uint64_t first_part_bytes) {
  const uint64_t last_bytes_max = std::min(kPieceBytesMax, kMessageBytesMax - first_part_bytes);
  if (left_bytes <= last_bytes_max) return left_bytes;
  return std::min(kPieceBytesMax, left_bytes - last_bytes_max);
}

}  // namespace

void AnswerOutbox::clear() {
  messages_.clear();
  sent_bytes_ = std::make_shared<Counter>(0);
}

void AnswerOutbox::pump(net::ServerSocket& socket) {
  is_full_ = false;
  while (!messages_.empty() && !is_full_) {
    if (send_piece(socket, messages_.front())) messages_.pop_front();
  }
}

bool AnswerOutbox::send_piece(net::ServerSocket& socket, Waiting& waiting) {
  const OutgoingMessage& outgoing = waiting.outgoing;
  wire::PoolAnswer head{
      .message = outgoing.message, .worker_id = outgoing.worker_id, .incarnation = outgoing.incarnation};
  const PoolResult* const result = outgoing.result.get();
  const std::string& text = result != nullptr ? result->text : outgoing.text;
  head.body = std::as_bytes(std::span(text));
  if (result == nullptr) {
    static_cast<void>(socket.send(outgoing.routing_id, wire::write_to_trainer(head)));
    return true;
  }
  head.kind = result->answer;
  head.flags = result->flags;
  head.fetch_time = result->fetch_time;
  head.prefix_time = result->prefix_time;
  head.state = result->state;
  if (!result->batch) {
    static_cast<void>(socket.send(outgoing.routing_id, wire::write_to_trainer(head)));
    return true;
  }

  const auto payload = result->batch->payload();
  const uint64_t bytes = piece_bytes(payload.size() - waiting.offset, kPoolHeadBytes + head.state.size());
  if (const uint64_t on_way = sent_bytes_->load(); on_way > 0 && on_way + bytes > kSentBytesMax) {
    is_full_ = true;
    return false;
  }
  const bool is_last = waiting.offset + bytes == payload.size();
  if (!is_last) {
    head = {.message = {.kind = ToTrainer::Kind::kPiece, .link = outgoing.message.link, .key = outgoing.message.key},
            .worker_id = outgoing.worker_id,
            .incarnation = outgoing.incarnation};
  } else {
    head.record_bytes = result->batch->record_bytes();
  }
  head.payload_bytes = payload.size();
  head.payload_offset = waiting.offset;
  const auto first = wire::write_to_trainer(head);
  sent_bytes_->fetch_add(bytes);
  std::array<net::OutgoingPart, 2> parts{
      net::OutgoingPart{.bytes = first, .release = nullptr},
      net::OutgoingPart{.bytes = payload.subspan(waiting.offset, bytes),
                        .release = [this, bytes, sent_bytes = sent_bytes_, held = outgoing.result]() mutable {
                          held.reset();
                          sent_bytes->fetch_sub(bytes);
                          exchange_.wake();
                        }}};
  waiting.offset += bytes;
  return !socket.send(outgoing.routing_id, parts) || is_last;
}

}  // namespace penstock::worker
