// SPDX-License-Identifier: Apache-2.0
// Messages about the blobs of a job, as a worker and a trainer read them. The size of the second part stands in front.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/blob_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kPieceSizeBytes = 8;
constexpr size_t kKindAt = 6, kOffsetAt = 40, kTotalBytesAt = 48, kReservedAt = 56;
constexpr uint8_t kRequest = 1, kPiece = 2, kUnknown = 3;

Bytes make(const wire::BlobMessage& message, uint64_t piece_bytes = 0) {
  const Bytes part = wire::write_blob_message(message);
  Bytes bytes(kPieceSizeBytes);
  std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
  bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const wire::BlobId id{std::byte{7}};
  return {make(wire::BlobRequest{.id = id}), make(wire::BlobRequest{.id = id, .offset = 200}),
          make(wire::BlobPiece{.id = id, .total_bytes = 200}, 200),
          make(wire::BlobPiece{.id = id, .offset = 200, .total_bytes = 300}, 60), make(wire::BlobUnknown{.id = id})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kPieceSizeBytes + wire::kBlobRecordBytes || choices.mostly())
    bytes.resize(kPieceSizeBytes + wire::kBlobRecordBytes);
  std::byte* part = bytes.data() + kPieceSizeBytes;
  const auto kind = choices.one_of({kRequest, kPiece, kPiece, kUnknown});
  if (choices.mostly()) std::memcpy(part, &wire::kBlobMagic, sizeof wire::kBlobMagic);
  if (choices.mostly()) std::memcpy(part + 4, &wire::kBlobVersion, sizeof wire::kBlobVersion);
  if (choices.mostly()) part[kKindAt] = std::byte{kind};
  if (choices.mostly()) part[kKindAt + 1] = std::byte{0};
  if (choices.mostly()) std::fill_n(part + kReservedAt, 8, std::byte{0});
  // Some of it is above its cap, and some pieces lie outside of their blob.
  const uint64_t total_bytes = kind == kPiece ? choices.below(wire::kBlobBytesMax + 50) : 0;
  const uint64_t offset = kind == kRequest ? choices.below(wire::kBlobBytesMax + 50) : choices.below(total_bytes + 1);
  const uint64_t piece_bytes = kind == kPiece ? 1 + choices.below(wire::kBlobPieceBytesMax + 50) : 0;
  if (choices.mostly()) std::memcpy(part + kTotalBytesAt, &total_bytes, sizeof total_bytes);
  if (choices.mostly()) std::memcpy(part + kOffsetAt, &offset, sizeof offset);
  if (choices.mostly()) std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
}

bool check(std::span<const std::byte> bytes) {
  if (bytes.size() < kPieceSizeBytes) return false;
  uint64_t piece_bytes = 0;
  std::memcpy(&piece_bytes, bytes.data(), sizeof piece_bytes);
  const auto part = bytes.subspan(kPieceSizeBytes);
  const auto parsed = wire::parse_blob_message(part, piece_bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::BlobMessage& message = parsed.value();
  expect(wire::is_blob_message(part), "what is parsed is told from other messages");
  const auto* piece = std::get_if<wire::BlobPiece>(&message);
  expect((piece != nullptr) == (piece_bytes > 0), "a piece comes with its bytes");
  if (piece != nullptr) {
    expect(piece->total_bytes <= wire::kBlobBytesMax, "blobs are capped");
    expect(piece_bytes <= wire::kBlobPieceBytesMax, "pieces are capped");
    expect(piece->offset <= piece->total_bytes, "a piece begins in its blob");
    expect(piece_bytes <= piece->total_bytes - piece->offset, "a piece ends in its blob");
  }
  if (const auto* wish = std::get_if<wire::BlobRequest>(&message))
    expect(wish->offset < wire::kBlobBytesMax, "a wish begins where a blob can be");
  expect(std::ranges::equal(wire::write_blob_message(message), part),
         "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
