// SPDX-License-Identifier: Apache-2.0
// Messages of a trainer or a server, as the process below it reads them: a local worker, or the process of a job.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/job_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kFlagsAt = 7, kIndexBytesAt = 72, kStateBytesAt = 80, kSeedsBytesAt = 88,
                 kBlobCountAt = 92, kIndexKindAt = 96, kErrorAt = 97, kReservedAt = 98;
constexpr size_t kKindCount = static_cast<size_t>(wire::ToJob::Kind::kStates);
constexpr size_t kErrorCount = static_cast<size_t>(Errc::kFailed) + 1;

}  // namespace

std::vector<Bytes> make_seeds() {
  using Kind = wire::ToJob::Kind;
  const Bytes some(24, std::byte{1});
  const auto question = std::span(some).first(16);
  const std::vector<wire::BlobId> blobs(2, wire::BlobId{std::byte{4}});
  const auto blob = std::span(blobs).first(1);
  wire::ToJob work{.is_lane_start = true,
                   .index_kind = wire::IndexKind::kIntegers,
                   .trainer_id = 5,
                   .tenancy = 1,
                   .key = {1, 3},
                   .lane = 1,
                   .link_bytes_per_s = 1e9,
                   .indices = some,
                   .seeds = some,
                   .state = some,
                   .blobs = blobs};
  std::vector<Bytes> seeds{wire::write_to_job(work), wire::write_to_job({.kind = Kind::kUnwanted}),
                           wire::write_to_job({.kind = Kind::kBlob, .blobs = blob, .body = some}),
                           wire::write_to_job({.kind = Kind::kBlobInFile, .blob_bytes = 1 << 21, .blobs = blob}),
                           wire::write_to_job({.kind = Kind::kNoBlob, .error = 5, .blobs = blob, .body = some})};
  for (const Kind kind : {Kind::kEpoch, Kind::kEarlyEpoch})
    seeds.push_back(wire::write_to_job({.kind = kind, .key = {2, 0}, .seeds = some}));
  seeds.push_back(wire::write_to_job({.kind = Kind::kPrefix, .body = some}));
  seeds.push_back(wire::write_to_job({.kind = Kind::kRemovePrefixes}));
  seeds.push_back(
      wire::write_to_job({.kind = Kind::kStates, .index_kind = wire::IndexKind::kIntegers, .indices = question}));
  work.seeds = work.state = {};
  seeds.push_back(wire::write_to_job(work));
  return seeds;
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < wire::kToJobHeadBytes) bytes.resize(wire::kToJobHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kToJobMagic, sizeof wire::kToJobMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kJobVersion, sizeof wire::kJobVersion);
  if (choices.mostly()) bytes[kKindAt] = std::byte(1 + choices.below(kKindCount));
  if (choices.mostly()) bytes[kFlagsAt] &= std::byte{1};
  if (choices.mostly()) bytes[kIndexKindAt] = std::byte(choices.below(4));
  // One of them is none.
  if (choices.mostly()) bytes[kErrorAt] = std::byte(choices.below(kErrorCount + 1));
  if (choices.mostly()) std::fill_n(bytes.begin() + kReservedAt, wire::kToJobHeadBytes - kReservedAt, std::byte{0});
  // What is behind the head is shared out among what may stand there, the blobs first; what is left is the body.
  uint64_t left = bytes.size() - wire::kToJobHeadBytes;
  const auto blob_count = static_cast<uint32_t>(choices.below(left / sizeof(wire::BlobId) + 1));
  left -= blob_count * sizeof(wire::BlobId);
  uint64_t index_bytes = choices.below(left + 1);
  if (choices.mostly()) index_bytes -= index_bytes % 8;
  left -= index_bytes;
  auto seeds_bytes = static_cast<uint32_t>(choices.below(left + 1));
  if (choices.mostly()) seeds_bytes -= seeds_bytes % 8;
  left -= seeds_bytes;
  const uint64_t state_bytes = choices.below(left + 1);
  if (choices.mostly()) std::memcpy(bytes.data() + kBlobCountAt, &blob_count, sizeof blob_count);
  if (choices.mostly()) std::memcpy(bytes.data() + kIndexBytesAt, &index_bytes, sizeof index_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kSeedsBytesAt, &seeds_bytes, sizeof seeds_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kStateBytesAt, &state_bytes, sizeof state_bytes);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_to_job(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::ToJob& message = parsed.value();
  size_t body_bytes = 0;
  for (const auto part : {std::as_bytes(message.blobs), message.indices, message.seeds, message.state, message.body}) {
    touch(part);
    body_bytes += part.size();
  }
  expect(body_bytes + wire::kToJobHeadBytes == bytes.size(), "nothing is left over");
  const auto kind = static_cast<size_t>(message.kind);
  expect(kind >= 1 && kind <= kKindCount, "kinds are known");
  expect(message.error < kErrorCount, "errors are known");
  expect(message.index_kind <= wire::IndexKind::kPickle, "kinds of indices are known");
  const bool are_integers = message.index_kind == wire::IndexKind::kIntegers;
  if (message.index_kind == wire::IndexKind::kInteger) expect(message.indices.size() == 8, "one index is 8 bytes");
  if (are_integers) expect(message.indices.size() % 8 == 0, "each index is 8 bytes");
  if (message.kind == wire::ToJob::Kind::kStates)
    expect(are_integers && message.indices.size() == 16, "a question is two integers");
  if (message.kind == wire::ToJob::Kind::kEpoch || message.kind == wire::ToJob::Kind::kEarlyEpoch)
    expect(message.seeds.size() % 8 == 0, "each seed is 8 bytes");
  expect(message.blobs.size() <= wire::kRequestBlobCountMax, "blobs are capped");
  expect(std::ranges::equal(wire::write_to_job(message), bytes), "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
