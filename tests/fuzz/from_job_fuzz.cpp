// SPDX-License-Identifier: Apache-2.0
// Messages of a process that makes batches, which runs people's code, as a server or a trainer reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/job_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kAnswerAt = 7, kFlagsAt = 8, kPlacedAt = 10, kReservedAt = 11, kRecordBytesAt = 12,
                 kPayloadBytesAt = 16, kSlowestPlaceAt = 36, kSlowestShareAt = 38, kArenaAt = 44, kSlabAt = 56,
                 kStateBytesAt = 72, kTextBytesAt = 80;
constexpr size_t kSlabBytes = kStateBytesAt - kSlabAt;  // the slab, its generation and its bytes

using Kind = wire::FromJob::Kind;

Bytes make(const wire::FromJob& message) {
  Bytes bytes = wire::write_from_job(message);
  if (!message.place) bytes.resize(bytes.size() + message.payload_bytes);
  return bytes;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const Bytes text(20, std::byte{'x'});
  const Bytes half(wire::kJobBodyBytesMax / 2 - 5, std::byte{'y'});
  const wire::FromJob batch{.answer = wire::AnswerKind::kBatch,
                            .record_bytes = 30,
                            .payload_bytes = 100,
                            .samples = {.dataset_time = 1, .slowest_place = 2, .slowest_share = 3}};
  wire::FromJob with_state = batch;
  with_state.state = text;
  wire::FromJob in_slab = with_state;
  in_slab.place = {.arena_id = 1, .slab_index = 2, .generation = 3, .slab_bytes = 4096};
  wire::FromJob transient = in_slab;
  transient.place->is_transient = true;
  wire::FromJob new_arena = in_slab;
  new_arena.is_new_arena = true;
  return {make(batch),
          make(new_arena),
          make({.answer = wire::AnswerKind::kEnd, .key = {1, 2}, .state = text}),
          make({.kind = Kind::kReady}),
          make({.kind = Kind::kStates, .state = text}),
          make(with_state),
          make(in_slab),
          make(transient),
          make({.answer = wire::AnswerKind::kEnd}),
          make({.answer = wire::AnswerKind::kError, .text = text, .state = text}),
          make({.answer = wire::AnswerKind::kError, .text = half, .state = half}),
          make({.kind = Kind::kGivenUp}),
          make({.kind = Kind::kDeclined, .text = text}),
          make({.kind = Kind::kBlobRequest, .blob = {std::byte{1}}})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < wire::kFromJobHeadBytes) bytes.resize(wire::kFromJobHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kFromJobMagic, sizeof wire::kFromJobMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kJobVersion, sizeof wire::kJobVersion);
  const auto kind = choices.one_of(
      {Kind::kResult, Kind::kResult, Kind::kGivenUp, Kind::kDeclined, Kind::kBlobRequest, Kind::kReady, Kind::kStates});
  const auto answer =
      kind == Kind::kResult ? static_cast<wire::AnswerKind>(1 + choices.below(3)) : wire::AnswerKind::kNone;
  const bool is_batch = answer == wire::AnswerKind::kBatch;
  const uint8_t placed = is_batch ? choices.one_of({uint8_t{0}, uint8_t{1}, uint8_t{3}, uint8_t{5}}) : uint8_t{0};
  if (choices.mostly()) bytes[kKindAt] = static_cast<std::byte>(kind);
  if (choices.mostly()) bytes[kAnswerAt] = static_cast<std::byte>(answer);
  if (choices.mostly()) bytes[kFlagsAt] &= std::byte(is_batch ? wire::kBatchFlags : 0);
  if (choices.mostly()) bytes[kPlacedAt] = std::byte{placed};
  if (choices.mostly()) bytes[kReservedAt] = std::byte{0};
  if (choices.mostly()) bytes[kSlowestShareAt] |= std::byte{1};
  if (choices.below(4) == 0) std::fill_n(bytes.begin() + kSlowestPlaceAt, 4, std::byte{0});
  // libFuzzer keeps short inputs, so a body above the cap of texts and states is made here.
  if (choices.below(16) == 0) bytes.resize(wire::kFromJobHeadBytes + wire::kJobBodyBytesMax + choices.below(100));
  // The body is divided among blob, text, state and batch. Some of it is above its cap.
  if (kind == Kind::kBlobRequest && choices.mostly())
    bytes.resize(std::max(bytes.size(), wire::kFromJobHeadBytes + sizeof(wire::BlobId)));
  uint64_t left = bytes.size() - wire::kFromJobHeadBytes;
  if (kind == Kind::kBlobRequest) left -= std::min<uint64_t>(left, sizeof(wire::BlobId));
  const auto text_bytes = static_cast<uint32_t>(choices.below(left + 1));
  left -= text_bytes;
  const bool is_behind = is_batch && placed == 0;
  const uint64_t state_bytes = is_behind ? choices.below(left + 1) : left;
  left -= state_bytes;
  const uint64_t any_bytes = 1 + choices.below(wire::kPoolPayloadBytesMax + 50);
  const uint64_t payload_bytes = !is_batch ? 0 : is_behind ? left : any_bytes;
  const auto record_bytes = is_batch ? static_cast<uint32_t>(1 + choices.below(payload_bytes + 1)) : 0;
  if (choices.mostly()) std::memcpy(bytes.data() + kTextBytesAt, &text_bytes, sizeof text_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kStateBytesAt, &state_bytes, sizeof state_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kPayloadBytesAt, &payload_bytes, sizeof payload_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kRecordBytesAt, &record_bytes, sizeof record_bytes);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_from_job(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::FromJob& message = parsed.value();
  touch(message.text);
  touch(message.state);
  touch(message.payload);
  const size_t blob_bytes = message.kind == Kind::kBlobRequest ? sizeof message.blob : 0;
  expect(wire::kFromJobHeadBytes + blob_bytes + message.text.size() + message.state.size() + message.payload.size() ==
             bytes.size(),
         "nothing is left over");
  expect(message.text.size() + message.state.size() <= wire::kJobBodyBytesMax, "texts and states are capped");
  expect((message.kind == Kind::kResult) == (message.answer != wire::AnswerKind::kNone), "results are answers");
  const bool is_batch = message.answer == wire::AnswerKind::kBatch;
  expect(!message.place || is_batch, "only batches lie in a slab");
  expect(!message.is_new_arena || message.place, "only a batch in a slab brings an arena");
  expect(message.state.empty() || message.kind == Kind::kResult || message.kind == Kind::kStates,
         "states are those after a result, or were asked for");
  expect(is_batch || message.flags == 0, "only batches have flags");
  expect((message.flags & ~wire::kBatchFlags) == 0, "flags are known");
  expect(is_batch == (message.payload_bytes > 0), "batches alone have a payload");
  expect(is_batch == (message.record_bytes > 0), "batches alone have a record");
  expect(message.record_bytes <= message.payload_bytes, "a record lies in its payload");
  expect(message.payload_bytes <= wire::kPoolPayloadBytesMax, "batches are capped");
  const bool is_behind = is_batch && !message.place;
  expect(message.payload.size() == (is_behind ? message.payload_bytes : 0), "a batch is as long as its head says");
  expect(message.samples.slowest_share != 0 || message.samples.slowest_place == 0, "a sample that is known has a time");
  Bytes expected(bytes.begin(), bytes.end());
  if (!message.place) {
    // These say nothing then.
    std::fill_n(expected.begin() + kArenaAt, 4, std::byte{0});
    std::fill_n(expected.begin() + kSlabAt, kSlabBytes, std::byte{0});
  }
  Bytes written = wire::write_from_job(message);
  written.insert(written.end(), message.payload.begin(), message.payload.end());
  expect(written == expected, "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
