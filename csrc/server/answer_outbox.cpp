// SPDX-License-Identifier: Apache-2.0
#include "server/answer_outbox.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/live_clock.h"
#include "wire/pool_record.h"

namespace penstock::server {
namespace {

std::vector<std::byte> write(const OutgoingMessage& outgoing, const std::optional<wire::SlabPlace>& place,
                             const wire::WorkerMeter& meter) {
  const PoolResult* const result = outgoing.result.get();
  const std::string& text = result != nullptr ? result->text : outgoing.text;
  wire::PoolAnswer answer{.message = outgoing.message,
                          .worker_id = outgoing.worker_id,
                          .incarnation = outgoing.incarnation,
                          .sent_at = static_cast<uint64_t>(clock_now().time_since_epoch().count()),
                          .meter = meter,
                          .body = std::as_bytes(std::span(text)),
                          .grant = outgoing.grant,
                          .place = place};
  if (result != nullptr) {
    answer.kind = result->answer;
    answer.flags = result->flags;
    answer.fetch_time = result->fetch_time;
    answer.prefix_time = result->prefix_time;
    answer.samples = result->samples;
    answer.cpu_share = result->cpu_share;
    answer.sample_count = result->sample_count;
    answer.dataset_size = result->dataset_size;
    answer.state = result->state;
    if (result->batch) {
      answer.record_bytes = result->batch->record_bytes();
      answer.payload_bytes = result->batch->payload().size();
    }
  }
  return wire::write_to_trainer(answer);
}

}  // namespace

void AnswerOutbox::push(OutgoingMessage message) {
  if (message.result != nullptr && message.result->batch)
    batches_.push_back({.key = message.message.key, .result = message.result});
  messages_.push_back(std::move(message));
}

void AnswerOutbox::drop(wire::BatchKey key) {
  std::erase_if(batches_, [&](const Batch& batch) { return batch.key == key; });
}

void AnswerOutbox::clear() {
  messages_.clear();
  batches_.clear();
}

void AnswerOutbox::pump(net::ServerSocket& socket, net::DataServer& data, SlabHandover* handover,
                        const wire::WorkerMeter& meter) {
  for (; !messages_.empty(); messages_.pop_front()) {
    const OutgoingMessage& outgoing = messages_.front();
    std::optional<wire::SlabPlace> place;
    if (handover != nullptr && outgoing.result && outgoing.result->batch)
      place = handover->hand_over(*outgoing.result->batch);
    if (place) drop(outgoing.message.key);  // none of its chunks are needed
    auto bytes = write(outgoing, place, meter);
    static_cast<void>(socket.send(outgoing.routing_id, bytes));
    if (outgoing.grant) wipe(bytes);
  }
  while (!batches_.empty() && data.has_room()) {
    Batch& batch = batches_.front();
    const auto payload = batch.result->batch->payload();
    const auto piece =
        payload.subspan(batch.offset, std::min<uint64_t>(wire::kPieceBytesMax, payload.size() - batch.offset));
    const wire::PieceHead head{.key = batch.key, .payload_bytes = payload.size(), .payload_offset = batch.offset};
    batch.offset += piece.size();
    const bool is_sent = static_cast<bool>(data.send(head, piece));
    if (!is_sent || batch.offset == payload.size()) batches_.pop_front();
  }
}

}  // namespace penstock::server
