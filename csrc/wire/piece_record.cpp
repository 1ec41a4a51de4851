// SPDX-License-Identifier: Apache-2.0
#include "wire/piece_record.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "wire/malformed.h"
#include "wire/message_head.h"

namespace penstock::wire {
namespace {

struct Head {
  uint32_t magic = kPieceMagic;
  uint16_t version = kPieceVersion;
  uint8_t kind = 0;
  uint8_t reserved = 0;
  uint64_t sender = 0;
  uint32_t link = 0;
  uint32_t epoch = 0;
  uint64_t counter = 0;
  uint64_t sequence = 0;
  uint64_t payload_bytes = 0;
  uint64_t payload_offset = 0;
  uint64_t reserved_end = 0;
};
static_assert(sizeof(Head) == kPieceHeadBytes);

constexpr std::string_view kPieceSubject = "a message of a pool data connection";

Fault malformed_piece(std::string_view reason) { return malformed(kPieceSubject, reason); }

}  // namespace

PieceHeadBytes write_piece_head(const PieceHead& head) {
  const Head record{.kind = static_cast<uint8_t>(head.kind),
                    .sender = head.sender,
                    .link = head.link,
                    .epoch = head.key.epoch,
                    .counter = head.counter,
                    .sequence = head.key.sequence,
                    .payload_bytes = head.payload_bytes,
                    .payload_offset = head.payload_offset};
  PieceHeadBytes bytes{};
  std::memcpy(bytes.data(), &record, sizeof record);
  return bytes;
}

Result<SealedPiece> parse_piece(std::span<const std::byte> message) {
  if (message.size() < kPieceHeadBytes + kSealTagBytes)
    return malformed_piece("it is " + std::to_string(message.size()) + " bytes long");
  if (message.size() > kPieceMessageBytesMax) {
    return Fault{Errc::kTooLarge, "a message of a data connection of " + std::to_string(message.size()) +
                                      " bytes is above the cap of " + std::to_string(kPieceMessageBytesMax)};
  }
  const auto read = read_head<Head>(message, {.magic = kPieceMagic,
                                              .version = kPieceVersion,
                                              .kind_max = static_cast<uint8_t>(PieceHead::Kind::kPiece),
                                              .subject = kPieceSubject});
  if (!read) return read.error();
  const Head& head = read.value();
  if (head.reserved != 0 || head.reserved_end != 0) return malformed_piece("reserved bytes are not zero");
  if (head.sender == 0 || head.counter == 0) return malformed_piece("it has no sender or no number");
  const SealedPiece piece{.head = {.kind = static_cast<PieceHead::Kind>(head.kind),
                                   .sender = head.sender,
                                   .link = head.link,
                                   .counter = head.counter,
                                   .key = {.epoch = head.epoch, .sequence = head.sequence},
                                   .payload_bytes = head.payload_bytes,
                                   .payload_offset = head.payload_offset},
                          .head_bytes = message.first(kPieceHeadBytes),
                          .sealed = message.subspan(kPieceHeadBytes)};
  if (piece.head.kind == PieceHead::Kind::kJoin) {
    const bool is_bare = piece.size() == 0 && head.payload_bytes == 0 && head.payload_offset == 0 && head.epoch == 0 &&
                         head.sequence == 0;
    return is_bare ? Result<SealedPiece>(piece) : malformed_piece("a joining trainer must not send batch bytes");
  }
  if (head.payload_bytes > kPoolPayloadBytesMax) {
    return Fault{Errc::kTooLarge, "a batch of " + std::to_string(head.payload_bytes) + " bytes is above the cap of " +
                                      std::to_string(kPoolPayloadBytesMax)};
  }
  if (piece.size() == 0) return malformed_piece("a chunk has no bytes");
  if (head.payload_offset > head.payload_bytes || piece.size() > head.payload_bytes - head.payload_offset)
    return malformed_piece("a chunk lies outside its batch");
  return piece;
}

}  // namespace penstock::wire
