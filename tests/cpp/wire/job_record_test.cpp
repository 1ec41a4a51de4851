// SPDX-License-Identifier: Apache-2.0
#include "wire/job_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wire/reports.h"
#include "with.h"
#include "wrong_field.h"

namespace penstock::wire {
namespace {

using std::string_view_literals::operator""sv;
using Bytes = std::vector<std::byte>;

Bytes job_bytes(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

Bytes with_behind(Bytes first, std::span<const std::byte> second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Each wrong value of each field is refused, and the message that it is written to is not.
template <typename Parse>
void expect_refused(const Bytes& right, std::span<const WrongField> fields, Parse parse) {
  ASSERT_TRUE(parse(right)) << parse(right).error().message;
  for (const WrongField& field : fields) {
    SCOPED_TRACE(std::string(field.name) + ": " + std::to_string(field.value));
    auto wrong = right;
    write_field(wrong, field);
    const auto parsed = parse(wrong);
    EXPECT_FALSE(parsed);
    if (!parsed) {
      EXPECT_EQ(parsed.error().code, Errc::kMalformed) << parsed.error().message;
    }
  }
}

template <typename Parse>
void expect_mismatch(const Bytes& right, Parse parse) {
  const auto parsed = parse(with<uint16_t>(right, 4, kJobVersion + 8));
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  for (const int version : {kJobVersion + 8, int{kJobVersion}}) {
    EXPECT_NE(parsed.error().message.find("version " + std::to_string(version)), std::string::npos)
        << parsed.error().message;
  }
}

// No beginning of it that is shorter than `size_least` is taken.
template <typename Parse>
void expect_truncations_refused(const Bytes& right, size_t size_least, Parse parse) {
  ASSERT_LE(size_least, right.size());
  for (size_t size = 0; size < size_least; ++size) {
    const auto parsed = parse(std::span<const std::byte>(right).first(size));
    ASSERT_FALSE(parsed) << size;
    EXPECT_EQ(parsed.error().code, Errc::kMalformed) << size;
  }
}

BlobId job_blob_id(uint8_t value) {
  BlobId id;
  id.fill(std::byte{value});
  return id;
}

// ---- To the process of a job

class ToJobRecord : public testing::Test {
 protected:
  ToJob work() const {
    return {.is_lane_start = true,
            .is_named = true,
            .index_kind = IndexKind::kIntegers,
            .trainer_id = 0x0102030405060708,
            .tenancy = 9,
            .key = {.epoch = 11, .sequence = 12},
            .lane = 13,
            .epoch_seed = 14,
            .first_place = 15,
            .link_bytes_per_s = 1.5e9,
            .indices = indices_,
            .seeds = seeds_,
            .state = state_,
            .blobs = blobs_};
  }
  std::vector<ToJob> others() const {
    const auto blob = std::span(blobs_).first(1);
    return {{.kind = ToJob::Kind::kUnwanted},
            {.kind = ToJob::Kind::kWanted},
            {.kind = ToJob::Kind::kBlob, .blobs = blob, .body = state_},
            {.kind = ToJob::Kind::kBlob, .blobs = blob},
            {.kind = ToJob::Kind::kBlobInFile, .blob_bytes = uint64_t{3} << 33, .blobs = blob},
            {.kind = ToJob::Kind::kNoBlob,
             .error = static_cast<uint8_t>(Errc::kUnsupported),
             .blobs = blob,
             .body = state_},
            {.kind = ToJob::Kind::kEpoch, .key = {.epoch = 2}, .seeds = indices_},
            {.kind = ToJob::Kind::kEarlyEpoch, .key = {.epoch = 3}},
            {.kind = ToJob::Kind::kPrefix, .key = {.epoch = 2}, .body = state_},
            {.kind = ToJob::Kind::kRemovePrefixes, .key = {.epoch = 2}},
            {.kind = ToJob::Kind::kStates, .index_kind = IndexKind::kIntegers, .indices = indices_}};
  }
  static void expect_same(const ToJob& read, const ToJob& sent) {
    EXPECT_EQ(read.kind, sent.kind);
    EXPECT_EQ(read.error, sent.error);
    EXPECT_EQ(read.is_lane_start, sent.is_lane_start);
    EXPECT_EQ(read.is_named, sent.is_named);
    EXPECT_EQ(read.index_kind, sent.index_kind);
    EXPECT_EQ(read.trainer_id, sent.trainer_id);
    EXPECT_EQ(read.tenancy, sent.tenancy);
    EXPECT_EQ(read.key, sent.key);
    EXPECT_EQ(read.lane, sent.lane);
    EXPECT_EQ(read.epoch_seed, sent.epoch_seed);
    EXPECT_EQ(read.first_place, sent.first_place);
    EXPECT_EQ(read.link_bytes_per_s, sent.link_bytes_per_s);
    EXPECT_EQ(read.blob_bytes, sent.blob_bytes);
    EXPECT_TRUE(std::ranges::equal(read.indices, sent.indices));
    EXPECT_TRUE(std::ranges::equal(read.seeds, sent.seeds));
    EXPECT_TRUE(std::ranges::equal(read.state, sent.state));
    EXPECT_TRUE(std::ranges::equal(read.blobs, sent.blobs));
    EXPECT_TRUE(std::ranges::equal(read.body, sent.body));
  }

  Bytes indices_ = job_bytes("sixteen bytes...");
  Bytes seeds_ = job_bytes("seeds");
  Bytes state_ = job_bytes("a state");
  std::array<BlobId, 2> blobs_{job_blob_id(1), job_blob_id(2)};
};

TEST_F(ToJobRecord, WorkComesBackWithAllThatBelongsToIt) {
  const auto part = write_to_job(work());
  ASSERT_EQ(part.size(), kToJobHeadBytes + indices_.size() + seeds_.size() + state_.size() + sizeof blobs_);
  const auto parsed = parse_to_job(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  expect_same(parsed.value(), work());
}

TEST_F(ToJobRecord, EveryOtherKindComesBack) {
  for (const ToJob& sent : others()) {
    SCOPED_TRACE(int{static_cast<uint8_t>(sent.kind)});
    const auto part = write_to_job(sent);
    const auto parsed = parse_to_job(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    expect_same(parsed.value(), sent);
  }
}

TEST_F(ToJobRecord, FieldThatIsOutOfRangeIsRefused) {
  constexpr uint64_t kHuge = kAllBits - 103;  // 8 bytes each
  std::vector<WrongField> fields{
      {"magic", 0, 4, kFromJobMagic},
      {"kind", 6, 1, 0},
      {"kind", 6, 1, 12},
      {"kind", 6, 1, 255},
      {"flags", 7, 1, 4},
      {"flags", 7, 1, 0x81},
      {"bytes of the indices", 72, 8, indices_.size() + seeds_.size() + state_.size() + 1},
      {"bytes of the indices", 72, 8, kHuge},
      {"bytes of the indices", 72, 8, kAllBits},
      {"bytes of the state", 80, 8, state_.size() + 1},
      {"bytes of the state", 80, 8, kAllBits},
      {"bytes of the seeds", 88, 4, seeds_.size() + state_.size() + 1},
      {"bytes of the seeds", 88, 4, kAllBits},
      {"blobs", 92, 4, 3},  // whose third would end behind the message
      {"blobs", 92, 4, kRequestBlobCountMax + 1},
      {"blobs", 92, 4, kAllBits},
      {"index kind", 96, 1, 4},
      {"bytes of one index", 96, 1, 1},  // which are 16
      {"bytes of the indices", 72, 8, 15},
      {"error", 97, 1, static_cast<uint64_t>(Errc::kFailed) + 1},
      {"error", 97, 1, 255},
  };
  for (size_t offset = 98; offset < kToJobHeadBytes; ++offset) fields.push_back({"reserved", offset, 1, 1});
  expect_refused(write_to_job(work()), fields, parse_to_job);
}

TEST_F(ToJobRecord, IntegersOfALocalWorkerThatAreNotEightBytesEachAreRefused) {
  const auto first = [&](size_t bytes) { return std::span<const std::byte>(indices_).first(bytes); };
  EXPECT_FALSE(parse_to_job(write_to_job({.kind = ToJob::Kind::kEpoch, .seeds = first(15)})));
  EXPECT_FALSE(parse_to_job(write_to_job({.kind = ToJob::Kind::kEarlyEpoch, .seeds = first(1)})));
  EXPECT_FALSE(parse_to_job(write_to_job({.kind = ToJob::Kind::kStates, .index_kind = IndexKind::kIntegers})));
  EXPECT_FALSE(parse_to_job(
      write_to_job({.kind = ToJob::Kind::kStates, .index_kind = IndexKind::kIntegers, .indices = first(8)})));
  EXPECT_FALSE(parse_to_job(
      write_to_job({.kind = ToJob::Kind::kStates, .index_kind = IndexKind::kPickle, .indices = first(16)})));
}

TEST_F(ToJobRecord, HeadIsThatOfTheWholeMessage) {
  const auto part = write_to_job(work());
  EXPECT_TRUE(std::ranges::equal(to_job_head(work()), std::span(part).first(kToJobHeadBytes)));
}

TEST_F(ToJobRecord, FieldsLieWhereTheProtocolSays) {
  const auto part = write_to_job({.kind = ToJob::Kind::kRemovePrefixes, .key = {.epoch = 1, .sequence = 2}, .lane = 3});
  Bytes expected(kToJobHeadBytes);
  const uint8_t bytes[] = {0x50, 0x4e, 0x4a, 0x31, 2, 0, 10, 0};
  std::memcpy(expected.data(), bytes, sizeof bytes);
  expected[24] = std::byte{2};
  expected[32] = std::byte{1};
  expected[36] = std::byte{3};
  EXPECT_EQ(part, expected);
}

TEST_F(ToJobRecord, LengthsThatAreTogetherAsLongAsTheBodyButWrapAroundAreRefused) {
  auto part = with(write_to_job(work()), 72, ~uint64_t{0} - 103);
  part = with(std::move(part), 80, uint64_t{indices_.size() + state_.size() + 104});
  EXPECT_FALSE(parse_to_job(part));
}

TEST_F(ToJobRecord, MostBlobsAreTakenAndOneMoreIsRefused) {
  const std::vector<BlobId> blobs(kRequestBlobCountMax);
  auto most = work();
  most.blobs = blobs;
  auto part = write_to_job(most);
  ASSERT_TRUE(parse_to_job(part));
  EXPECT_EQ(parse_to_job(part).value().blobs.size(), kRequestBlobCountMax);
  part.resize(part.size() + sizeof(BlobId));
  part = with<uint32_t>(std::move(part), 92, kRequestBlobCountMax + 1);
  ASSERT_FALSE(parse_to_job(part));
  EXPECT_EQ(parse_to_job(part).error().code, Errc::kMalformed);
}

TEST_F(ToJobRecord, EveryTruncationIsRefused) {
  const auto part = write_to_job(work());
  expect_truncations_refused(part, part.size(), parse_to_job);
  for (const ToJob& sent : others()) {
    const auto other = write_to_job(sent);
    expect_truncations_refused(other, other.size() - sent.body.size(), parse_to_job);
  }
}

TEST_F(ToJobRecord, FlippedBitIsRefusedOrSeen) {
  const auto part = write_to_job(work());
  for (size_t bit = 0; bit < 8 * kToJobHeadBytes; ++bit) {
    auto flipped = part;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_to_job(flipped);
    if (!parsed) continue;
    EXPECT_EQ(write_to_job(parsed.value()), flipped) << bit;
  }
}

TEST_F(ToJobRecord, AnotherVersionIsAMismatchThatNamesBoth) { expect_mismatch(write_to_job(work()), parse_to_job); }

// ---- From the process of a job

// As the server of a job reads it.
Result<FromJob> parse_from_job_of(std::span<const std::byte> part) { return parse_from_job(part); }

class FromJobRecord : public testing::Test {
 protected:
  FromJob batch() const {
    return {.answer = AnswerKind::kBatch,
            .key = {.epoch = 24, .sequence = 25},
            .flags = kBatchFlags | kBatchKeepingFlags,
            .cpu_share = 70,
            .record_bytes = 17,
            .payload_bytes = payload_.size(),
            .fetch_time = 15,
            .prefix_time = 16,
            .samples = {.dataset_time = 19, .slowest_place = 20, .slowest_share = 21},
            .sample_count = 22,
            .dataset_size = 23,
            .state = state_};
  }
  FromJob placed(bool is_transient = false) const {
    auto placed = batch();
    placed.place = SlabPlace{
        .arena_id = 3, .slab_index = 4, .generation = 5, .is_transient = is_transient, .slab_bytes = uint64_t{1} << 33};
    return placed;
  }
  FromJob error() const { return {.answer = AnswerKind::kError, .fetch_time = 15, .text = text_, .state = state_}; }
  FromJob end() const { return {.answer = AnswerKind::kEnd, .cpu_share = 1}; }
  FromJob given_up() const { return {.kind = FromJob::Kind::kGivenUp}; }
  FromJob declined() const { return {.kind = FromJob::Kind::kDeclined, .text = text_}; }
  FromJob wish() const { return {.kind = FromJob::Kind::kBlobRequest, .key = {2, 3}, .blob = job_blob_id(7)}; }
  FromJob ready() const { return {.kind = FromJob::Kind::kReady}; }
  FromJob states() const { return {.kind = FromJob::Kind::kStates, .key = {2, 0}, .state = state_}; }
  FromJob end_with_state() const { return {.answer = AnswerKind::kEnd, .key = {2, 3}, .state = state_}; }
  std::vector<FromJob> without_a_batch() const {
    return {error(), end(), given_up(), declined(), wish(), ready(), states(), end_with_state()};
  }

  // As it crosses: a batch that lies in no slab is behind its head.
  Bytes whole(const FromJob& message) const {
    const bool is_behind = message.answer == AnswerKind::kBatch && !message.place;
    return with_behind(write_from_job(message),
                       is_behind ? std::span<const std::byte>(payload_) : std::span<std::byte>());
  }
  static void expect_same(const FromJob& read, const FromJob& sent) {
    EXPECT_EQ(read.kind, sent.kind);
    EXPECT_EQ(read.answer, sent.answer);
    EXPECT_EQ(read.key, sent.key);
    EXPECT_EQ(read.is_new_arena, sent.is_new_arena);
    EXPECT_EQ(read.flags, sent.flags);
    EXPECT_EQ(read.cpu_share, sent.cpu_share);
    EXPECT_EQ(read.record_bytes, sent.record_bytes);
    EXPECT_EQ(read.payload_bytes, sent.payload_bytes);
    EXPECT_EQ(read.fetch_time, sent.fetch_time);
    EXPECT_EQ(read.prefix_time, sent.prefix_time);
    EXPECT_EQ(read.samples.dataset_time, sent.samples.dataset_time);
    EXPECT_EQ(read.samples.slowest_place, sent.samples.slowest_place);
    EXPECT_EQ(read.samples.slowest_share, sent.samples.slowest_share);
    EXPECT_EQ(read.sample_count, sent.sample_count);
    EXPECT_EQ(read.dataset_size, sent.dataset_size);
    EXPECT_EQ(read.place, sent.place);
    EXPECT_EQ(read.blob, sent.blob);
    EXPECT_TRUE(std::ranges::equal(read.text, sent.text));
    EXPECT_TRUE(std::ranges::equal(read.state, sent.state));
  }

  Bytes text_ = job_bytes("ValueError\0no sample 7"sv);
  Bytes state_ = job_bytes("a state");
  Bytes payload_ = Bytes(1000, std::byte{9});
};

TEST_F(FromJobRecord, BatchInASlabComesBack) {
  for (const bool is_transient : {false, true}) {
    for (const bool is_new_arena : {false, true}) {
      auto sent = placed(is_transient);
      sent.is_new_arena = is_new_arena;
      const auto part = whole(sent);
      EXPECT_EQ(part.size(), kFromJobHeadBytes + state_.size());
      const auto parsed = parse_from_job(part);
      ASSERT_TRUE(parsed) << parsed.error().message;
      expect_same(parsed.value(), sent);
      EXPECT_TRUE(parsed.value().payload.empty());
    }
  }
}

TEST_F(FromJobRecord, BatchBehindItsHeadComesBack) {
  const auto part = whole(batch());
  EXPECT_EQ(part.size(), kFromJobHeadBytes + state_.size() + payload_.size());
  const auto parsed = parse_from_job(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  expect_same(parsed.value(), batch());
  EXPECT_TRUE(std::ranges::equal(parsed.value().payload, payload_));
}

TEST_F(FromJobRecord, EveryOtherKindComesBack) {
  for (const FromJob& sent : without_a_batch()) {
    SCOPED_TRACE(int{static_cast<uint8_t>(sent.kind)});
    const auto part = whole(sent);
    const auto parsed = parse_from_job(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    expect_same(parsed.value(), sent);
    EXPECT_TRUE(parsed.value().payload.empty());
  }
}

TEST_F(FromJobRecord, FieldOfABatchThatIsOutOfRangeIsRefused) {
  std::vector<WrongField> fields{
      {"magic", 0, 4, kToJobMagic},
      {"kind", 6, 1, 0},
      {"kind", 6, 1, 7},
      {"kind", 6, 1, 255},
      {"a worker that is ready with an answer", 6, 1, 5},
      {"states that are an answer", 6, 1, 6},
      {"a given-up batch that is an answer", 6, 1, 2},
      {"a refusal that is an answer", 6, 1, 3},
      {"a wish that is an answer", 6, 1, 4},
      {"a result without an answer", 7, 1, 0},
      {"an end with a batch", 7, 1, 2},
      {"an error with a batch", 7, 1, 3},
      {"answer", 7, 1, 4},
      {"answer", 7, 1, 255},
      {"placed", 10, 1, 2},  // transient, and in no slab
      {"placed", 10, 1, 4},  // a new arena, and in no slab
      {"placed", 10, 1, 8},
      {"placed", 10, 1, 0x81},
      {"reserved", 11, 1, 1},
      {"bytes of the record", 12, 4, 0},
      {"bytes of the record", 12, 4, payload_.size() + 1},
      {"bytes of the batch", 16, 8, 0},
      {"bytes of the batch", 16, 8, 16},  // less than its record
      {"bytes of the batch", 16, 8, kPoolPayloadBytesMax + 1},
      {"bytes of the batch", 16, 8, kAllBits},
      {"share of the slowest sample", 38, 2, 0},  // which has a place
      {"bytes of the state", 72, 8, state_.size() - 1},
      {"bytes of the state", 72, 8, state_.size() + 1},
      {"bytes of the text", 80, 4, 1},
  };
  ASSERT_EQ(kBatchFlags | kBatchKeepingFlags, 0xff & ~2);
  fields.push_back({"flags", 8, 1, 2});
  for (const bool is_transient : {false, true}) expect_refused(whole(placed(is_transient)), fields, parse_from_job_of);
  expect_refused(whole(batch()), fields, parse_from_job_of);
}

TEST_F(FromJobRecord, HeadIsThatOfTheWholeMessage) {
  for (const FromJob& sent : {placed(), batch(), error(), wish()}) {
    const auto part = write_from_job(sent);
    EXPECT_TRUE(std::ranges::equal(from_job_head(sent), std::span(part).first(kFromJobHeadBytes)));
  }
}

TEST_F(FromJobRecord, FieldsLieWhereTheProtocolSays) {
  auto sent = placed(/*is_transient=*/true);
  sent.is_new_arena = true;
  sent.state = {};
  const uint8_t expected[kFromJobHeadBytes] = {0x50, 0x4e, 0x4f, 0x31, 2,  0, 1,  1, batch().flags,
                                               70,   7,    0,    17,   0,  0, 0,  // to the bytes of the record
                                               0xe8, 3,    0,    0,    0,  0, 0,  0, 15,
                                               0,    0,    0,    16,   0,  0, 0,  // to the prefix time
                                               19,   0,    0,    0,    20, 0, 21, 0, 22,
                                               0,    0,    0,    3,    0,  0, 0,  // to the arena
                                               23,   0,    0,    0,    0,  0, 0,  0, 4,
                                               0,    0,    0,    5,    0,  0, 0,  // to the generation
                                               0,    0,    0,    0,    2,  0, 0,  0, 0,
                                               0,    0,    0,    0,    0,  0, 0,  // to the bytes of the state
                                               0,    0,    0,    0,    24, 0, 0,  0, 25,
                                               0,    0,    0,    0,    0,  0, 0};  // to the sequence
  EXPECT_TRUE(std::ranges::equal(write_from_job(sent), std::as_bytes(std::span(expected))));
}

TEST_F(FromJobRecord, StatesOfALocalWorkerHaveACapOfTheirOwn) {
  const Bytes large(kJobBodyBytesMax + 1);
  auto sent = states();
  sent.state = large;
  EXPECT_EQ(parse_from_job(whole(sent)).error().code, Errc::kTooLarge);
  const auto parsed = parse_from_job(whole(sent), kLocalBodyBytesMax);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().state.size(), large.size());
}

TEST_F(FromJobRecord, BatchThatIsBothInASlabAndBehindItsHeadOrInNeitherIsRefused) {
  EXPECT_FALSE(parse_from_job(with_behind(whole(placed()), payload_)));
  EXPECT_FALSE(parse_from_job(write_from_job(batch())));
  EXPECT_FALSE(parse_from_job(with<uint8_t>(whole(batch()), 10, 1)));
  EXPECT_FALSE(parse_from_job(with<uint8_t>(whole(placed()), 10, 0)));
}

TEST_F(FromJobRecord, BatchThatIsNotAsLongAsItsHeadSaysIsRefused) {
  auto part = whole(batch());
  part.push_back({});
  EXPECT_FALSE(parse_from_job(part));
  part.resize(part.size() - 2);
  EXPECT_FALSE(parse_from_job(part));
  EXPECT_TRUE(parse_from_job(with(part, 16, uint64_t{payload_.size() - 1})));
}

TEST_F(FromJobRecord, WhatIsOfABatchIsRefusedOfAnythingElse) {
  for (const FromJob& sent : without_a_batch()) {
    SCOPED_TRACE(int{static_cast<uint8_t>(sent.kind)});
    const std::vector<WrongField> fields{{"flags", 8, 1, kBatchRaises},
                                         {"placed", 10, 1, 1},
                                         {"placed", 10, 1, 3},
                                         {"placed", 10, 1, 4},
                                         {"bytes of the record", 12, 4, 1},
                                         {"bytes of the batch", 16, 8, 1},
                                         {"bytes of the state", 72, 8, 1000}};
    expect_refused(whole(sent), fields, parse_from_job_of);
    auto longer = whole(sent);
    longer.push_back({});
    EXPECT_FALSE(parse_from_job(longer));
  }
}

TEST_F(FromJobRecord, LargestBatchIsTaken) {
  auto largest = placed();
  largest.payload_bytes = kPoolPayloadBytesMax;
  EXPECT_TRUE(parse_from_job(whole(largest)));
  largest.record_bytes = std::numeric_limits<uint32_t>::max();
  EXPECT_TRUE(parse_from_job(whole(largest)));
}

TEST_F(FromJobRecord, TextsAndStatesHaveOneCapTogether) {
  const Bytes half(kJobBodyBytesMax / 2);
  auto sent = error();
  sent.text = sent.state = half;
  ASSERT_TRUE(parse_from_job(whole(sent)));
  const Bytes longer(kJobBodyBytesMax - half.size() + 1);
  sent.state = longer;
  const auto parsed = parse_from_job(whole(sent));
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kTooLarge);
}

TEST_F(FromJobRecord, LengthAboveTheCapIsTooLargeWhateverHasCome) {
  const auto part = whole(error());
  for (const uint64_t bytes : {kJobBodyBytesMax + 1, kAllBits, kAllBits - text_.size() + 1}) {
    const auto parsed = parse_from_job(with(part, 72, bytes));
    ASSERT_FALSE(parsed) << bytes;
    EXPECT_EQ(parsed.error().code, Errc::kTooLarge) << bytes;
  }
  for (const auto bytes : {static_cast<uint32_t>(kJobBodyBytesMax + 1), ~uint32_t{0}}) {
    const auto parsed = parse_from_job(with(part, 80, bytes));
    ASSERT_FALSE(parsed) << bytes;
    EXPECT_EQ(parsed.error().code, Errc::kTooLarge) << bytes;
  }
}

TEST_F(FromJobRecord, EveryTruncationIsRefused) {
  auto messages = without_a_batch();
  messages.push_back(placed());
  messages.push_back(batch());
  for (const FromJob& sent : messages) {
    const auto part = whole(sent);
    expect_truncations_refused(part, part.size(), parse_from_job_of);
  }
}

TEST_F(FromJobRecord, FlippedBitIsRefusedOrSeen) {
  const auto part = whole(placed());
  for (size_t bit = 0; bit < 8 * kFromJobHeadBytes; ++bit) {
    auto flipped = part;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_from_job(flipped);
    if (!parsed) continue;
    EXPECT_EQ(write_from_job(parsed.value()), flipped) << bit;
  }
}

TEST_F(FromJobRecord, AnotherVersionIsAMismatchThatNamesBoth) { expect_mismatch(whole(placed()), parse_from_job_of); }

// ---- Between a server and its warm process

class WarmRecord : public testing::Test {
 protected:
  static WarmMessage ready(std::string_view about) {
    return {.kind = WarmMessage::Kind::kReady,
            .torch = 0x020f,
            .job_kinds = kind_bit(JobKind::kPlugin),
            .numerics = {1, 2, 3},
            .text = about};
  }
  static WarmMessage fork(std::string_view log_name) {
    return {.kind = WarmMessage::Kind::kFork, .job = 7, .text = log_name};
  }
  static std::vector<WarmMessage> samples() {
    return {ready("Python 3.12, torch 2.15"),
            ready(""),
            fork("penstock worker 01234567"),
            {.kind = WarmMessage::Kind::kStarted, .job = ~uint64_t{0}, .pid = 1234},
            {.kind = WarmMessage::Kind::kEnded, .job = 7, .pid = 1234, .status = 0x0300},
            {.kind = WarmMessage::Kind::kEnd, .job = 7}};
  }
};

TEST_F(WarmRecord, EveryKindComesBack) {
  for (const WarmMessage& sent : samples()) {
    SCOPED_TRACE(int{static_cast<uint8_t>(sent.kind)});
    const auto part = write_warm_message(sent);
    const bool is_ready = sent.kind == WarmMessage::Kind::kReady;
    EXPECT_EQ(part.size(), kWarmHeadBytes + (is_ready ? sizeof sent.numerics : 0) + sent.text.size());
    const auto parsed = parse_warm_message(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    const WarmMessage& read = parsed.value();
    EXPECT_EQ(read.kind, sent.kind);
    EXPECT_EQ(read.torch, sent.torch);
    EXPECT_EQ(read.job_kinds, sent.job_kinds);
    EXPECT_EQ(read.job, sent.job);
    EXPECT_EQ(read.pid, sent.pid);
    EXPECT_EQ(read.status, sent.status);
    EXPECT_EQ(read.numerics, sent.numerics);
    EXPECT_EQ(read.text, sent.text);
  }
}

TEST_F(WarmRecord, HasTheBytesOfTheSpecification) {
  std::vector<uint8_t> expected{0x50, 0x4e, 0x48, 0x31, 2, 0, 5, 0, 7};  // PNH1, version 2, end, job 7
  expected.resize(kWarmHeadBytes);
  const auto part = write_warm_message({.kind = WarmMessage::Kind::kEnd, .job = 7});
  ASSERT_EQ(part.size(), expected.size());
  EXPECT_EQ(std::memcmp(part.data(), expected.data(), expected.size()), 0);
}

TEST_F(WarmRecord, FieldThatIsOutOfRangeIsRefused) {
  std::vector<WrongField> fields{{"magic", 0, 4, kToJobMagic}, {"kind", 6, 1, 0},     {"kind", 6, 1, 6},
                                 {"kind", 6, 1, 255},          {"reserved", 7, 1, 1}, {"reserved", 7, 1, 255}};
  fields.push_back({"kinds of jobs", 26, 1, kJobKinds + 1});
  for (size_t offset = 27; offset < kWarmHeadBytes; ++offset) fields.push_back({"reserved", offset, 1, 1});
  for (const WarmMessage& sent : samples()) expect_refused(write_warm_message(sent), fields, parse_warm_message);
}

TEST_F(WarmRecord, KindsOfJobsAreThoseOfAReadyProcessAlone) {
  for (WarmMessage message : samples()) {
    const bool is_ready = message.kind == WarmMessage::Kind::kReady;
    for (const uint8_t kinds : {uint8_t{0}, kind_bit(JobKind::kPython), kJobKinds}) {
      message.job_kinds = kinds;
      EXPECT_EQ(bool(parse_warm_message(write_warm_message(message))), is_ready == (kinds != 0)) << int{kinds};
    }
  }
}

TEST_F(WarmRecord, TextAboveItsCapIsRefused) {
  for (const auto& [make, bytes_max] : {std::pair(&ready, kAboutBytesMax), std::pair(&fork, kLogNameBytesMax)}) {
    EXPECT_TRUE(parse_warm_message(write_warm_message(make(std::string(bytes_max, 'x')))));
    const auto parsed = parse_warm_message(write_warm_message(make(std::string(bytes_max + 1, 'x'))));
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, Errc::kMalformed);
  }
}

TEST_F(WarmRecord, TextOfWhatHasNoneIsRefused) {
  for (const auto kind : {WarmMessage::Kind::kStarted, WarmMessage::Kind::kEnded, WarmMessage::Kind::kEnd})
    EXPECT_FALSE(parse_warm_message(write_warm_message({.kind = kind, .job = 7, .text = "x"})));
}

TEST_F(WarmRecord, EveryTruncationIsRefused) {
  for (const WarmMessage& sent : samples()) {
    const auto part = write_warm_message(sent);
    expect_truncations_refused(part, part.size() - sent.text.size(), parse_warm_message);
  }
}

TEST_F(WarmRecord, FlippedBitIsRefusedOrSeen) {
  for (const WarmMessage& sent : samples()) {
    const auto part = write_warm_message(sent);
    for (size_t bit = 0; bit < 8 * part.size(); ++bit) {
      auto flipped = part;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      const auto parsed = parse_warm_message(flipped);
      if (!parsed) continue;
      EXPECT_EQ(write_warm_message(parsed.value()), flipped) << bit;
    }
  }
}

TEST_F(WarmRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  expect_mismatch(write_warm_message(ready("")), parse_warm_message);
}

}  // namespace
}  // namespace penstock::wire
