// SPDX-License-Identifier: Apache-2.0
#include "loader/worker_link.h"

#include <algorithm>
#include <array>
#include <utility>

namespace penstock::loader {

bool WorkerLink::take_piece(const wire::PoolAnswer& answer, std::span<const std::byte> piece, BatchMemory& memory) {
  if (answer.message.link != number_) {
    incoming_.clear();
    number_ = answer.message.link;
  }
  // A batch that is sent again on a link of its own begins anew there.
  if (answer.payload_offset == 0) incoming_.erase(answer.message.key);
  auto found = incoming_.find(answer.message.key);
  if (found == incoming_.end()) {
    if (answer.payload_offset != 0) return false;
    found = incoming_.try_emplace(answer.message.key, memory, answer.payload_bytes).first;
  }
  return found->second.add(answer.payload_offset, piece);
}

std::optional<IncomingBatch> WorkerLink::take_whole(wire::BatchKey key) {
  auto node = incoming_.extract(key);
  if (node.empty() || !node.mapped().is_whole()) return std::nullopt;
  return std::move(node.mapped());
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
      net::OutgoingPart{.bytes = piece, .release = [blob] {}},  // which holds it until then
  };
  static_cast<void>(socket_->send(parts));
}

}  // namespace penstock::loader
