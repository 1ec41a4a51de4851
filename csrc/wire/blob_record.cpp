// SPDX-License-Identifier: Apache-2.0
#include "wire/blob_record.h"

#include <cstring>
#include <string>
#include <string_view>

#include "wire/malformed.h"

namespace penstock::wire {
namespace {

enum class Kind : uint8_t { kWish = 1, kPiece = 2, kUnknown = 3 };

struct BlobHead {
  uint32_t magic = kBlobMagic;
  uint16_t version = kBlobVersion;
  Kind kind = Kind::kWish;
  uint8_t reserved = 0;
  BlobId id{};
  uint64_t offset = 0;
  uint64_t total_bytes = 0;
  uint64_t reserved_end = 0;
};
static_assert(sizeof(BlobHead) == kBlobRecordBytes);

Fault malformed_blob(std::string_view reason) { return malformed("a message about a blob of a job", reason); }

std::vector<std::byte> bytes_of(const BlobHead& head) {
  const auto bytes = std::as_bytes(std::span(&head, 1));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

std::span<const BlobId> blob_ids(std::span<const std::byte> bytes) {
  PENSTOCK_ASSERT(bytes.size() % sizeof(BlobId) == 0);
  return {reinterpret_cast<const BlobId*>(bytes.data()), bytes.size() / sizeof(BlobId)};
}

bool is_blob_message(std::span<const std::byte> part) {
  uint32_t magic = 0;
  if (part.size() < sizeof magic) return false;
  std::memcpy(&magic, part.data(), sizeof magic);
  return magic == kBlobMagic;
}

std::vector<std::byte> write_blob_message(const BlobMessage& message) {
  if (const auto* wish = std::get_if<BlobWish>(&message))
    return bytes_of({.kind = Kind::kWish, .id = wish->id, .offset = wish->offset});
  if (const auto* piece = std::get_if<BlobPiece>(&message))
    return bytes_of(
        {.kind = Kind::kPiece, .id = piece->id, .offset = piece->offset, .total_bytes = piece->total_bytes});
  return bytes_of({.kind = Kind::kUnknown, .id = std::get<BlobUnknown>(message).id});
}

Result<BlobMessage> parse_blob_message(std::span<const std::byte> part, uint64_t piece_bytes) {
  BlobHead head;
  if (part.size() != sizeof head) return malformed_blob("it is " + std::to_string(part.size()) + " bytes long");
  std::memcpy(&head, part.data(), sizeof head);
  if (head.magic != kBlobMagic) return malformed_blob("its magic number is wrong");
  if (head.version != kBlobVersion) {
    return Fault{Errc::kMismatch, "a message about a blob of a job has version " + std::to_string(head.version) +
                                      ", but this process uses version " + std::to_string(kBlobVersion) +
                                      "; run the same version of penstock on both sides"};
  }
  if (head.reserved != 0 || head.reserved_end != 0) return malformed_blob("reserved bytes are not zero");
  if ((head.kind == Kind::kPiece) != (piece_bytes > 0))
    return malformed_blob("a chunk and its bytes must be sent together");
  switch (head.kind) {
    case Kind::kWish:
      if (head.total_bytes != 0) return malformed_blob("a request must not have a size");
      if (head.offset >= kBlobBytesMax) return malformed_blob("a request is beyond the maximum blob size");
      return BlobMessage(BlobWish{.id = head.id, .offset = head.offset});
    case Kind::kPiece:
      if (piece_bytes > kBlobPieceBytesMax || head.total_bytes > kBlobBytesMax || head.offset > head.total_bytes ||
          piece_bytes > head.total_bytes - head.offset)
        return malformed_blob("a chunk lies outside its blob");
      return BlobMessage(BlobPiece{.id = head.id, .offset = head.offset, .total_bytes = head.total_bytes});
    case Kind::kUnknown:
      if (head.offset != 0 || head.total_bytes != 0) return malformed_blob("a missing blob must not have a size");
      return BlobMessage(BlobUnknown{.id = head.id});
  }
  return malformed_blob("unknown kind " + std::to_string(static_cast<int>(head.kind)));
}

}  // namespace penstock::wire
