// SPDX-License-Identifier: Apache-2.0
#include "server/answer_outbox.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "wire/pool_record.h"

namespace penstock::server {
namespace {

constexpr size_t kNewcomerCountMax = 8;  // the newest
constexpr uint32_t kCopyIds = 1u << 31;  // ids of copies' arenas start here; those of the pool at 0

}  // namespace

Result<std::unique_ptr<SlabHandover>> SlabHandover::listen(const std::string& name, shm::SlabPool& slabs) {
  auto listener = shm::ChannelListener::bind(name);
  if (!listener) return listener.error();
  return std::make_unique<SlabHandover>(std::move(listener).value(), slabs);
}

void SlabHandover::begin(uint64_t trainer_id, uint32_t link) {
  end();
  while (auto accepted = listener_.accept()) {
    // Its first message was sent before the greeting that led to this call.
    const auto message = accepted.value().receive(std::chrono::steady_clock::now());
    const auto hello = message ? message.value().as<wire::HandoverHello>() : std::nullopt;
    if (!hello) continue;
    if (newcomers_.size() >= kNewcomerCountMax) newcomers_.pop_front();
    newcomers_.push_back({.hello = *hello, .channel = std::move(accepted).value()});
  }
  // Channels for later links stay: a trainer may have greeted again before this worker handled its first greeting.
  const wire::HandoverHello expected{.trainer_id = trainer_id, .link = link};
  const auto found = std::find_if(newcomers_.begin(), newcomers_.end(),
                                  [&](const Newcomer& newcomer) { return newcomer.hello == expected; });
  if (found == newcomers_.end()) return;
  channel_.emplace(std::move(found->channel));
  newcomers_.erase(newcomers_.begin(), found + 1);
}

void SlabHandover::end() {
  if (!channel_) return;
  channel_.reset();
  if (std::exchange(passed_arena_id_, std::nullopt)) slabs_.renew();
}

std::optional<wire::SlabPlace> SlabHandover::hand_over(HeldBatch& batch) {
  const shm::SlabRegion* region = batch.region();
  if (!channel_ || region == nullptr) return std::nullopt;
  if (batch.is_handed_over()) return hand_copy_over(batch);
  const auto place = name(*region);
  if (place) batch.note_handed_over();
  return place;
}

std::optional<wire::SlabPlace> SlabHandover::hand_copy_over(const HeldBatch& batch) {
  const auto payload = batch.payload();
  const auto arena =
      shm::Arena::create({.slab_bytes = payload.size(), .slab_count = 1}, kCopyIds | (copy_count_++ & (kCopyIds - 1)));
  if (!arena) return std::nullopt;
  const auto slab_index = arena.value()->try_acquire();
  if (!slab_index || !arena.value()->reserve(*slab_index, payload.size())) return std::nullopt;
  std::memcpy(arena.value()->slab(*slab_index), payload.data(), payload.size());
  return name({.arena = arena.value(), .slab_index = *slab_index, .is_transient = true});
}

std::optional<wire::SlabPlace> SlabHandover::name(const shm::SlabRegion& region) {
  const shm::Arena& arena = *region.arena;
  if (region.is_transient || passed_arena_id_ != arena.id()) {
    const wire::HandoverArena passed{.arena_id = arena.id()};
    const int fd = arena.fd();
    if (!channel_->send_record(passed, {&fd, 1})) {
      end();
      return std::nullopt;
    }
    if (!region.is_transient) passed_arena_id_ = arena.id();
  }
  return wire::SlabPlace{.arena_id = arena.id(),
                         .slab_index = region.slab_index,
                         .generation = arena.generation(region.slab_index),
                         .is_transient = region.is_transient,
                         .slab_bytes = arena.backed_bytes(region.slab_index)};
}

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
