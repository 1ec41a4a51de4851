// SPDX-License-Identifier: Apache-2.0
#include "pool_client/data_link.h"

#include <utility>

namespace penstock::pool_client {

Result<void> DataLink::connect(net::SocketContext& context, net::Resolver& resolver, const wire::SealGrant& grant) {
  auto client = net::DataClient::connect(context, resolver, name_, offer_, grant);
  if (!client) return client.error();
  client_ = std::move(client).value();
  offer_ = {};
  return {};
}

DataLink::Outcome DataLink::fail(std::string fault) {
  fault_ = std::move(fault);
  return Outcome::kFault;
}

// Chunks are decrypted even if their batch is not awaited: the contents of a head are trustworthy only if its seal is
// valid.
DataLink::Outcome DataLink::keep_piece(loader::BatchMemory& memory, bool is_awaited) {
  const wire::SealedPiece& piece = client_->piece();
  const wire::BatchKey key = piece.head.key;
  if (!is_awaited || piece.head.payload_offset == 0) incoming_.erase(key);
  if (!is_awaited) {
    unwanted_.resize(piece.size());
    return client_->open(unwanted_) ? Outcome::kPiece : fail(client_->fault());
  }
  if (piece.head.payload_offset == 0) incoming_.try_emplace(key, memory, piece.head.payload_bytes);
  const auto found = incoming_.find(key);
  const auto room = found == incoming_.end() ? std::span<std::byte>()
                                             : found->second.room_for(piece.head.payload_offset, piece.size());
  if (room.empty()) return fail("it is not the next one of its batch");
  if (!client_->open(room)) {
    incoming_.erase(found);
    return fail(client_->fault());
  }
  found->second.add(piece.size());
  return Outcome::kPiece;
}

bool DataLink::has_whole(wire::BatchKey key) const {
  const auto found = incoming_.find(key);
  return found != incoming_.end() && found->second.is_whole();
}

std::optional<loader::IncomingBatch> DataLink::take_whole(wire::BatchKey key) {
  auto node = incoming_.extract(key);
  if (node.empty() || !node.mapped().is_whole()) return std::nullopt;
  return std::move(node.mapped());
}

}  // namespace penstock::pool_client
