// SPDX-License-Identifier: Apache-2.0
// Messages of a pool's trainers, as a worker reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kIndexBytesAt = 56, kStateBytesAt = 64, kIndexKindAt = 72, kBlobCountAt = 73,
                 kReservedAt = 74, kSeedsBytesAt = 76;

struct Sizes {
  size_t index_bytes = 0;
  size_t seeds_bytes = 0;
  size_t state_bytes = 0;
  size_t blob_count = 0;
};

Bytes make(wire::ToWorker::Kind kind, wire::IndexKind index_kind = wire::IndexKind::kNone, const Sizes& sizes = {}) {
  const Bytes indices(sizes.index_bytes, std::byte{1});
  const Bytes seeds(sizes.seeds_bytes, std::byte{2});
  const Bytes state(sizes.state_bytes, std::byte{3});
  const std::vector<wire::BlobId> blobs(sizes.blob_count, wire::BlobId{std::byte{4}});
  return wire::write_to_worker(
      {.message = {.kind = kind, .trainer_id = 5, .link = 1, .stamp = 2, .key = {1, 3}, .lane = 1},
       .index_kind = index_kind,
       .epoch_seed = 4,
       .indices = indices,
       .seeds = seeds,
       .state = state,
       .blobs = blobs});
}

Bytes make_hello() {
  return wire::write_to_worker(
      {.message = {.kind = wire::ToWorker::Kind::kHello, .trainer_id = 5, .link = 1, .stamp = 1},
       .offer = wire::SealOffer{.ciphers = 3, .nonce = {std::byte{6}}},
       .secret = {std::byte{7}, std::byte{8}}});
}

// Behind a head: the set of ciphers and the nonce, then the secret of the run.
constexpr size_t kHelloBytes = 1 + wire::kSealNonceBytes + wire::kRunSecretBytes;

}  // namespace

std::vector<Bytes> make_seeds() {
  using Kind = wire::ToWorker::Kind;
  return {make_hello(),
          make(Kind::kRequest, wire::IndexKind::kInteger, {.index_bytes = 8, .blob_count = 1}),
          make(Kind::kRequest, wire::IndexKind::kIntegers, {.index_bytes = 24, .seeds_bytes = 4, .blob_count = 2}),
          make(Kind::kRequest, wire::IndexKind::kPickle, {.index_bytes = 7, .state_bytes = 9, .blob_count = 1}),
          make(Kind::kRequest, wire::IndexKind::kNone, {.seeds_bytes = 3, .state_bytes = 2}),
          make(Kind::kAck),
          make(Kind::kBye)};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < wire::kToWorkerHeadBytes) bytes.resize(wire::kToWorkerHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kToWorkerMagic, sizeof wire::kToWorkerMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kPoolVersion, sizeof wire::kPoolVersion);
  if (choices.mostly()) bytes[kKindAt] = std::byte(choices.below(8) == 0 ? 1 + choices.below(6) : 2);
  if (choices.mostly()) bytes[kKindAt + 1] &= std::byte{3};
  if (choices.mostly()) bytes[8] |= std::byte{1};
  if (choices.mostly()) bytes[kIndexKindAt] = std::byte(choices.below(4));
  if (choices.mostly()) std::fill_n(bytes.begin() + kReservedAt, 2, std::byte{0});
  if (bytes[kKindAt] == std::byte{1} && choices.mostly()) {
    bytes.resize(wire::kToWorkerHeadBytes + kHelloBytes + (choices.mostly() ? 0 : choices.below(3)));
    std::fill(bytes.begin() + kIndexBytesAt, bytes.begin() + wire::kToWorkerHeadBytes, std::byte{0});
    bytes[wire::kToWorkerHeadBytes] = std::byte(choices.below(5));
    return;
  }
  // The body is shared out among what may stand in it, the blobs first.
  uint64_t left = bytes.size() - wire::kToWorkerHeadBytes;
  const uint64_t blob_count = choices.below(std::min<uint64_t>(left / sizeof(wire::BlobId), 255) + 1);
  left -= blob_count * sizeof(wire::BlobId);
  uint64_t index_bytes = choices.below(left + 1);
  if (choices.mostly()) index_bytes -= index_bytes % 8;
  left -= index_bytes;
  const auto seeds_bytes = static_cast<uint32_t>(choices.below(left + 1));
  const uint64_t state_bytes = left - seeds_bytes;
  if (choices.mostly()) bytes[kBlobCountAt] = std::byte(blob_count);
  if (choices.mostly()) std::memcpy(bytes.data() + kSeedsBytesAt, &seeds_bytes, sizeof seeds_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kIndexBytesAt, &index_bytes, sizeof index_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kStateBytesAt, &state_bytes, sizeof state_bytes);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_to_worker(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::PoolRequest& request = parsed.value();
  const auto blobs = std::as_bytes(request.blobs);
  const bool is_hello = request.message.kind == wire::ToWorker::Kind::kHello;
  expect(is_hello == request.offer.has_value(), "hellos offer keys");
  if (request.offer)
    expect(request.offer->ciphers != 0 && (request.offer->ciphers & ~wire::kSealCiphers) == 0, "ciphers are known");
  size_t body_bytes = is_hello ? kHelloBytes : 0;
  for (const auto part : {request.indices, request.seeds, request.state, blobs}) {
    touch(part);
    body_bytes += part.size();
  }
  expect(body_bytes + wire::kToWorkerHeadBytes == bytes.size(), "nothing is left over");
  expect(request.blobs.size() <= wire::kRequestBlobCountMax, "blobs are capped");
  if (request.message.kind != wire::ToWorker::Kind::kRequest)
    expect(request.index_kind == wire::IndexKind::kNone && (is_hello || body_bytes == 0), "only requests have a body");
  if (request.index_kind == wire::IndexKind::kInteger) expect(request.indices.size() == 8, "one index is 8 bytes");
  if (request.index_kind == wire::IndexKind::kIntegers)
    expect(request.indices.size() % 8 == 0, "each index is 8 bytes");
  expect(std::ranges::equal(wire::write_to_worker(request), bytes),
         "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
