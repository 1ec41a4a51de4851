// SPDX-License-Identifier: Apache-2.0
#include "server/slab_handover.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

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

}  // namespace penstock::server
