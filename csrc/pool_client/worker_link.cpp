// SPDX-License-Identifier: Apache-2.0
#include "pool_client/worker_link.h"

#include <algorithm>
#include <array>
#include <utility>

namespace penstock::pool_client {
namespace {

// A worker has at most some dozens of outstanding answers, and sends few other messages.
constexpr size_t kWaitingCountMax = 1024;

}  // namespace

bool WorkerLink::is_at(const std::string& host) const {
  return endpoint_.host == host || (data_ && data_->is_granted() && data_->endpoint().host == host);
}

std::optional<Instant> WorkerLink::due_at() const {
  const auto due = earlier(reconnect_at, socket_->due_at());
  return data_ && data_->is_granted() ? earlier(due, data_->due_at()) : due;
}

void WorkerLink::begin_link(const net::LinkName& name, const wire::SealOffer& offer) {
  end_link();
  data_.emplace(name, offer);
}

void WorkerLink::end_link() {
  waiting_.clear();
  data_.reset();
  passed_.reset();
}

bool WorkerLink::add_waiting(net::ReceivedPart part) {
  if (waiting_.size() >= kWaitingCountMax) return false;
  waiting_.push_back(std::move(part));
  return true;
}

void WorkerLink::hand_out(const wire::BlobWish& wish, const std::shared_ptr<const std::string>& blob) {
  if (blob == nullptr || wish.offset >= blob->size()) {
    const auto answer = wire::write_blob_message(wire::BlobUnknown{.id = wish.id});
    static_cast<void>(socket_->send(answer));
    return;
  }
  const auto head =
      wire::write_blob_message(wire::BlobPiece{.id = wish.id, .offset = wish.offset, .total_bytes = blob->size()});
  const uint64_t size = std::min<uint64_t>(wire::kBlobPieceBytesMax, blob->size() - wish.offset);
  const auto piece = std::as_bytes(std::span(*blob)).subspan(wish.offset, size);
  std::array<net::OutgoingPart, 2> parts{
      net::OutgoingPart{.bytes = head, .release = nullptr},
      net::OutgoingPart{.bytes = piece, .release = [blob] {}},  // keeps the blob until the part was sent
  };
  static_cast<void>(socket_->send(parts));
}

}  // namespace penstock::pool_client
