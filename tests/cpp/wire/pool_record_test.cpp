// SPDX-License-Identifier: Apache-2.0
#include "wire/pool_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "../base/left_bytes.h"

namespace penstock::wire {
namespace {

class PieceRecord : public testing::Test {
 protected:
  static std::vector<std::byte> message(const PieceHead& head, size_t sealed_bytes) {
    const auto bytes = write_piece_head(head);
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    message.resize(message.size() + sealed_bytes, std::byte{9});
    return message;
  }

  const PieceHead piece_{.sender = 0x0102030405060708,
                         .link = 9,
                         .counter = 10,
                         .key = {.epoch = 11, .sequence = 12},
                         .payload_bytes = 1000,
                         .payload_offset = 900};
  const PieceHead join_{.kind = PieceHead::Kind::kJoin, .sender = 7, .link = 9, .counter = 1};
};

TEST_F(PieceRecord, PieceComesBack) {
  const auto bytes = message(piece_, 100 + kSealTagBytes);
  const auto parsed = parse_piece(bytes);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().head, piece_);
  EXPECT_EQ(parsed.value().size(), 100u);
  EXPECT_EQ(parsed.value().head_bytes.data(), bytes.data());
  EXPECT_EQ(parsed.value().sealed.data(), bytes.data() + kPieceHeadBytes);
}

TEST_F(PieceRecord, PieceOutsideOfItsBatchIsRefused) {
  EXPECT_TRUE(parse_piece(message(piece_, 1 + kSealTagBytes)));
  EXPECT_TRUE(parse_piece(message(piece_, 100 + kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(piece_, 101 + kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(piece_, kSealTagBytes)));
  auto beyond = piece_;
  beyond.payload_offset = ~uint64_t{0} - 50;
  EXPECT_FALSE(parse_piece(message(beyond, 100 + kSealTagBytes)));
}

TEST_F(PieceRecord, PieceOrBatchAboveItsCapIsTooLarge) {
  auto large = piece_;
  large.payload_bytes = kPoolPayloadBytesMax;
  large.payload_offset = kPoolPayloadBytesMax - kPieceBytesMax;
  EXPECT_TRUE(parse_piece(message(large, kPieceBytesMax + kSealTagBytes)));
  EXPECT_EQ(parse_piece(message(large, kPieceBytesMax + 1 + kSealTagBytes)).error().code, Errc::kTooLarge);
  ++large.payload_bytes;
  EXPECT_EQ(parse_piece(message(large, 100 + kSealTagBytes)).error().code, Errc::kTooLarge);
}

TEST_F(PieceRecord, JoinHasNothingOfABatch) {
  EXPECT_TRUE(parse_piece(message(join_, kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(join_, kSealTagBytes + 1)));
  auto other = join_;
  other.payload_bytes = 1;
  EXPECT_FALSE(parse_piece(message(other, kSealTagBytes)));
  other = join_;
  other.key.sequence = 1;
  EXPECT_FALSE(parse_piece(message(other, kSealTagBytes)));
}

TEST_F(PieceRecord, TruncatedMessagesAreRefused) {
  const auto bytes = message(piece_, kSealTagBytes);
  for (size_t size = 0; size < bytes.size(); ++size) ASSERT_FALSE(parse_piece(std::span(bytes).first(size))) << size;
}

TEST_F(PieceRecord, FlippedBitIsRefusedOrSeen) {
  const auto bytes = message(piece_, 100 + kSealTagBytes);
  for (size_t bit = 0; bit < 8 * kPieceHeadBytes; ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_piece(flipped);
    if (!parsed) continue;
    EXPECT_TRUE(std::ranges::equal(write_piece_head(parsed.value().head), std::span(flipped).first(kPieceHeadBytes)));
  }
}

TEST_F(PieceRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  auto bytes = message(piece_, 100 + kSealTagBytes);
  bytes[4] = std::byte{7};
  const auto parsed = parse_piece(bytes);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  EXPECT_NE(parsed.error().message.find("version 7"), std::string::npos);
}

using std::string_view_literals::operator""sv;

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

class PoolRecord : public testing::Test {
 protected:
  PoolRequest request() const {
    return {.message = {.kind = ToWorker::Kind::kRequest,
                        .trainer_id = 0x0102030405060708,
                        .link = 9,
                        .stamp = 10,
                        .key = {.epoch = 11, .sequence = 12},
                        .lane = 13,
                        .is_lane_start = true},
            .index_kind = IndexKind::kIntegers,
            .epoch_seed = 14,
            .first_place = 21,
            .indices = indices_,
            .seeds = seeds_,
            .state = state_,
            .blobs = blobs_};
  }
  PoolAnswer answer() const {
    return {.message = {.kind = ToTrainer::Kind::kAnswer, .link = 9, .stamp = 10, .key = {.epoch = 11, .sequence = 12}},
            .worker_id = 13,
            .incarnation = 14,
            .kind = AnswerKind::kBatch,
            .flags = kBatchRaises,
            .record_bytes = 17,
            .payload_bytes = 1000,
            .fetch_time = 15,
            .prefix_time = 16,
            .samples = {.dataset_time = 19, .slowest_place = 20, .slowest_share = 21},
            .meter = {.cpu_ns = 18, .energy_uj = 19},
            .sample_count = 20,
            .state = state_};
  }
  PoolRequest hello() const {
    return {.message = {.kind = ToWorker::Kind::kHello, .trainer_id = 1, .link = 9, .stamp = 1},
            .offer = offer_,
            .secret = secret_};
  }
  PoolAnswer welcome() const {
    return {.message = {.kind = ToTrainer::Kind::kWelcome, .link = 9, .stamp = 1},
            .worker_id = 13,
            .incarnation = 14,
            .grant = grant_};
  }
  PoolAnswer refusal(ToTrainer::Kind kind) const {
    return {.message = {.kind = kind, .link = 9}, .worker_id = 13, .incarnation = 14, .body = reason_};
  }
  PoolAnswer raised() const {
    auto raised = answer();
    raised.kind = AnswerKind::kError;
    raised.flags = 0;
    raised.record_bytes = 0;
    raised.payload_bytes = 0;
    raised.sample_count = 0;
    raised.body = reason_;
    raised.state = {};
    return raised;
  }
  PoolAnswer death() const {
    auto death = refusal(ToTrainer::Kind::kDied);
    death.message.stamp = 10;
    death.message.key = {.epoch = 11, .sequence = 12};
    return death;
  }
  static bool is_taken(const PoolAnswer& answer) { return bool(parse_to_trainer(write_to_trainer(answer))); }

  std::vector<std::byte> indices_ = bytes_of("sixteen bytes...");
  std::vector<std::byte> seeds_ = bytes_of("seeds");
  std::vector<std::byte> state_ = bytes_of("a state");
  std::vector<std::byte> reason_ = bytes_of("ValueError\0no sample 7"sv);
  std::array<BlobId, 2> blobs_{BlobId{std::byte{1}}, BlobId{std::byte{2}}};
  const SealOffer offer_{.ciphers = kSealCiphers, .nonce = {std::byte{1}, std::byte{2}}};
  const RunSecret secret_{std::byte{5}, std::byte{6}};
  const SealGrant grant_{.cipher = SealCipher::kChaCha20Poly1305,
                         .nonce = {std::byte{3}},
                         .data_endpoint = "tcp://worker.example:7001",
                         .numerics = {7, 8}};
};

TEST_F(PoolRecord, RequestComesBackWithAllThatBelongsToIt) {
  const auto part = write_to_worker(request());
  ASSERT_EQ(part.size(), kToWorkerHeadBytes + indices_.size() + seeds_.size() + state_.size() + 2 * sizeof(BlobId));
  const auto parsed = parse_to_worker(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().message, request().message);
  EXPECT_EQ(parsed.value().index_kind, IndexKind::kIntegers);
  EXPECT_EQ(parsed.value().epoch_seed, 14u);
  EXPECT_EQ(parsed.value().first_place, 21u);
  EXPECT_TRUE(std::ranges::equal(parsed.value().indices, indices_));
  EXPECT_TRUE(std::ranges::equal(parsed.value().seeds, seeds_));
  EXPECT_TRUE(std::ranges::equal(parsed.value().state, state_));
  EXPECT_TRUE(std::ranges::equal(parsed.value().blobs, blobs_));
}

TEST_F(PoolRecord, RequestWithTooManyBlobsIsRefused) {
  const std::vector<BlobId> blobs(kRequestBlobCountMax + 1);
  auto most = request();
  most.blobs = std::span(blobs).first(kRequestBlobCountMax);
  auto part = write_to_worker(most);
  ASSERT_TRUE(parse_to_worker(part));
  EXPECT_EQ(parse_to_worker(part).value().blobs.size(), kRequestBlobCountMax);
  part[73] = std::byte{kRequestBlobCountMax + 1};
  part.resize(part.size() + sizeof(BlobId));
  const auto parsed = parse_to_worker(part);
  ASSERT_FALSE(parsed);
  EXPECT_NE(parsed.error().message.find("too many blobs"), std::string::npos);
}

TEST_F(PoolRecord, LengthsThatAreTogetherAsLongAsTheBodyButWrapAroundAreRefused) {
  auto part = write_to_worker(request());
  const uint64_t huge = ~uint64_t{0} - 100, rest = indices_.size() + state_.size() + 101;
  std::memcpy(part.data() + 56, &huge, sizeof huge);
  std::memcpy(part.data() + 64, &rest, sizeof rest);
  EXPECT_FALSE(parse_to_worker(part));
}

TEST_F(PoolRecord, OnlyRequestsHaveABody) {
  const auto part = write_to_worker(request());
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ToWorker::Kind::kBye); ++kind) {
    auto other = part;
    other[6] = std::byte{kind};
    EXPECT_EQ(bool(parse_to_worker(other)), kind == static_cast<uint8_t>(ToWorker::Kind::kRequest)) << int{kind};
  }
}

TEST_F(PoolRecord, EveryKindComesBack) {
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ToWorker::Kind::kBye); ++kind) {
    PoolRequest sent{.message = {.kind = static_cast<ToWorker::Kind>(kind), .trainer_id = 1, .is_continued = true}};
    if (sent.message.kind == ToWorker::Kind::kHello) sent.offer = offer_;
    const auto part = write_to_worker(sent);
    ASSERT_TRUE(parse_to_worker(part));
    EXPECT_EQ(parse_to_worker(part).value().message, sent.message);
  }
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ToTrainer::Kind::kDied); ++kind) {
    PoolAnswer sent{.message = {.kind = static_cast<ToTrainer::Kind>(kind), .is_fresh = true}};
    if (sent.message.kind == ToTrainer::Kind::kAnswer) sent.kind = AnswerKind::kEnd;
    if (sent.message.kind == ToTrainer::Kind::kWelcome) sent.grant = grant_;
    const auto part = write_to_trainer(sent);
    const auto parsed = parse_to_trainer(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().message, sent.message);
  }
}

TEST_F(PoolRecord, BatchComesBack) {
  const auto part = write_to_trainer(answer());
  const auto parsed = parse_to_trainer(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().message, answer().message);
  EXPECT_EQ(parsed.value().worker_id, 13u);
  EXPECT_EQ(parsed.value().incarnation, 14u);
  EXPECT_EQ(parsed.value().kind, AnswerKind::kBatch);
  EXPECT_EQ(parsed.value().flags, kBatchRaises);
  EXPECT_EQ(parsed.value().record_bytes, 17u);
  EXPECT_EQ(parsed.value().payload_bytes, 1000u);
  EXPECT_EQ(parsed.value().meter, answer().meter);
  EXPECT_EQ(parsed.value().sample_count, 20u);
  EXPECT_EQ(parsed.value().fetch_time, 15u);
  EXPECT_EQ(parsed.value().prefix_time, 16u);
  EXPECT_EQ(parsed.value().samples.dataset_time, 19u);
  EXPECT_EQ(parsed.value().samples.slowest_place, 20u);
  EXPECT_EQ(parsed.value().samples.slowest_share, 21u);
  EXPECT_TRUE(parsed.value().body.empty());
  EXPECT_TRUE(std::ranges::equal(parsed.value().state, state_));
}

TEST_F(PoolRecord, PlaceOfABatchInSharedMemoryComesBackWithItsState) {
  for (const bool is_transient : {false, true}) {
    auto sent = answer();
    sent.place = {
        .arena_id = 3, .slab_index = 4, .generation = 5, .is_transient = is_transient, .slab_bytes = uint64_t{1} << 33};
    const auto part = write_to_trainer(sent);
    const auto parsed = parse_to_trainer(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().place, sent.place);
    EXPECT_TRUE(parsed.value().body.empty());
    EXPECT_TRUE(std::ranges::equal(parsed.value().state, state_));
  }
}

TEST_F(PoolRecord, PlaceOfOtherThanABatchOrOfAnotherLengthIsRefused) {
  constexpr size_t kFlagsAt = 7, kTransientAt = kToTrainerHeadBytes + 12;
  auto error = write_to_trainer(raised());
  error[kFlagsAt] |= std::byte{2};
  EXPECT_FALSE(parse_to_trainer(error));
  auto without = write_to_trainer(answer());
  without[kFlagsAt] |= std::byte{2};
  EXPECT_FALSE(parse_to_trainer(without)) << "a batch whose place is not there";
  auto sent = answer();
  sent.place = SlabPlace{};
  auto part = write_to_trainer(sent);
  part[kTransientAt] = std::byte{2};
  EXPECT_FALSE(parse_to_trainer(part));
}

TEST_F(PoolRecord, ReasonsAndErrorsComeBack) {
  for (const auto& sent :
       {refusal(ToTrainer::Kind::kRefused), refusal(ToTrainer::Kind::kDeclined), death(), raised()}) {
    const auto part = write_to_trainer(sent);
    const auto parsed = parse_to_trainer(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().message, sent.message);
    EXPECT_EQ(parsed.value().kind, sent.kind);
    EXPECT_TRUE(std::ranges::equal(parsed.value().body, reason_));
    EXPECT_TRUE(parsed.value().state.empty());
  }
}

TEST_F(PoolRecord, ReasonAboveItsCapIsCutOffByTheWriterAndRefusedByTheReader) {
  const std::vector<std::byte> longer(kReasonBytesMax + 1, std::byte{'x'});
  for (auto sent : {refusal(ToTrainer::Kind::kDeclined), death()}) {
    sent.body = longer;
    auto part = write_to_trainer(sent);
    const auto parsed = parse_to_trainer(part);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().body.size(), kReasonBytesMax);
    part.push_back(std::byte{'x'});
    ASSERT_FALSE(parse_to_trainer(part));
    EXPECT_EQ(parse_to_trainer(part).error().code, Errc::kTooLarge);
  }
}

TEST_F(PoolRecord, DeathThatIsAnAnswerAsWellOrHasMoreThanAReasonIsRefused) {
  EXPECT_TRUE(is_taken(death()));
  for (const AnswerKind kind : {AnswerKind::kBatch, AnswerKind::kEnd, AnswerKind::kError}) {
    auto answering = death();
    answering.kind = kind;
    if (kind == AnswerKind::kBatch) answering.record_bytes = 17, answering.payload_bytes = 1000;
    if (kind != AnswerKind::kError) answering.body = {};
    EXPECT_FALSE(is_taken(answering)) << int{static_cast<uint8_t>(kind)};
  }
  auto with_payload = death();
  with_payload.payload_bytes = 1000;
  EXPECT_FALSE(is_taken(with_payload));
  auto with_samples = death();
  with_samples.sample_count = 1;
  EXPECT_FALSE(is_taken(with_samples));
  auto in_slab = write_to_trainer(death());
  in_slab[7] |= std::byte{2};
  EXPECT_FALSE(parse_to_trainer(in_slab));
  auto beyond_the_last_kind = write_to_trainer(death());
  beyond_the_last_kind[6] = std::byte{11};
  EXPECT_FALSE(parse_to_trainer(beyond_the_last_kind));
}

TEST_F(PoolRecord, TextOfWhatIsNeitherAnErrorNorARefusalIsRefused) {
  auto broken = refusal(ToTrainer::Kind::kBroken);
  EXPECT_FALSE(is_taken(broken));
  broken.body = {};
  EXPECT_TRUE(is_taken(broken));
  auto batch = answer();
  batch.body = reason_;
  EXPECT_FALSE(is_taken(batch));
}

TEST_F(PoolRecord, ErrorComesBackWithTheStateAfterIt) {
  auto sent = raised();
  sent.state = state_;
  const auto part = write_to_trainer(sent);
  const auto parsed = parse_to_trainer(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_TRUE(std::ranges::equal(parsed.value().body, reason_));
  EXPECT_TRUE(std::ranges::equal(parsed.value().state, state_));
}

TEST_F(PoolRecord, StateOfWhatIsNeitherABatchNorAnErrorIsRefused) {
  auto end = raised();
  end.kind = AnswerKind::kEnd;
  for (auto sent : {refusal(ToTrainer::Kind::kDeclined), refusal(ToTrainer::Kind::kPong), death(), end}) {
    sent.body = {};
    EXPECT_TRUE(is_taken(sent));
    sent.state = state_;
    EXPECT_FALSE(is_taken(sent));
  }
}

TEST_F(PoolRecord, OfferAndGrantOfKeysComeBackWithTheRunsSecret) {
  const auto to_worker = write_to_worker(hello());
  const auto offered = parse_to_worker(to_worker);
  ASSERT_TRUE(offered) << offered.error().message;
  EXPECT_EQ(offered.value().message, hello().message);
  EXPECT_EQ(offered.value().offer, offer_);
  EXPECT_EQ(offered.value().secret, secret_);
  EXPECT_EQ(write_to_worker(offered.value()), to_worker);
  const auto to_trainer = write_to_trainer(welcome());
  const auto granted = parse_to_trainer(to_trainer);
  ASSERT_TRUE(granted) << granted.error().message;
  EXPECT_EQ(granted.value().message, welcome().message);
  EXPECT_EQ(granted.value().grant, grant_);
  EXPECT_TRUE(granted.value().body.empty());
}

TEST_F(PoolRecord, HelloWithoutAnOfferOfKeysOrWithoutASecretIsRefused) {
  const auto part = write_to_worker(hello());
  for (size_t size = kToWorkerHeadBytes; size < part.size(); ++size)
    EXPECT_FALSE(parse_to_worker(std::span(part).first(size))) << size;
  auto longer = part;
  longer.push_back({});
  EXPECT_FALSE(parse_to_worker(longer));
  for (const uint8_t ciphers : {0, 4, 0xff}) {
    auto other = part;
    other[kToWorkerHeadBytes] = std::byte{ciphers};
    EXPECT_FALSE(parse_to_worker(other)) << int{ciphers};
  }
}

TEST_F(PoolRecord, WelcomeWithoutAGrantOfKeysIsRefused) {
  const auto part = write_to_trainer(welcome());
  for (size_t size = kToTrainerHeadBytes; size <= part.size() - grant_.data_endpoint.size(); ++size)
    EXPECT_FALSE(parse_to_trainer(std::span(part).first(size))) << size;
  auto longest = welcome();
  longest.grant->data_endpoint.assign(kDataEndpointBytesMax, 'x');
  EXPECT_TRUE(is_taken(longest));
  longest.grant->data_endpoint += 'x';
  EXPECT_FALSE(is_taken(longest));
  for (const uint8_t cipher : {0, 3}) {
    auto other = part;
    other[kToTrainerHeadBytes] = std::byte{cipher};
    EXPECT_FALSE(parse_to_trainer(other)) << int{cipher};
  }
}

TEST_F(PoolRecord, RecordIsNeitherMissingNorLargerThanThePayload) {
  auto batch = answer();
  batch.record_bytes = 1000;
  EXPECT_TRUE(is_taken(batch));
  batch.record_bytes = 1001;
  EXPECT_FALSE(is_taken(batch));
  batch.record_bytes = 0;
  EXPECT_FALSE(is_taken(batch));
}

TEST_F(PoolRecord, EnergyIsUnknownUnlessItIsTold) {
  const auto part = write_to_trainer({.message = {.kind = ToTrainer::Kind::kPong}, .meter = {.cpu_ns = 5}});
  const auto parsed = parse_to_trainer(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_FALSE(parsed.value().meter.has_energy());
  EXPECT_TRUE((WorkerMeter{.energy_uj = 0}).has_energy());
}

TEST_F(PoolRecord, OnlyBatchesHaveSamples) {
  auto raised_with_samples = raised();
  raised_with_samples.sample_count = 1;
  EXPECT_FALSE(is_taken(raised_with_samples));
}

TEST_F(PoolRecord, OnlyBatchesHaveAPayload) {
  EXPECT_TRUE(is_taken(raised()));
  auto raised_with_payload = raised();
  raised_with_payload.payload_bytes = 1000;
  EXPECT_FALSE(is_taken(raised_with_payload));
}

TEST_F(PoolRecord, BatchAboveItsCapIsRefused) {
  auto large = answer();
  large.payload_bytes = kPoolPayloadBytesMax;
  EXPECT_TRUE(is_taken(large));
  large.payload_bytes = kPoolPayloadBytesMax + 1;
  EXPECT_EQ(parse_to_trainer(write_to_trainer(large)).error().code, Errc::kTooLarge);
}

TEST_F(PoolRecord, TruncatedAndLengthenedMessagesAreRefused) {
  auto to_worker = write_to_worker(request());
  for (size_t size = 0; size < to_worker.size(); ++size)
    ASSERT_FALSE(parse_to_worker(std::span(to_worker).first(size))) << size;
  to_worker.push_back({});
  EXPECT_FALSE(parse_to_worker(to_worker));
  auto to_trainer = write_to_trainer(answer());
  for (size_t size = 0; size < to_trainer.size(); ++size)
    ASSERT_FALSE(parse_to_trainer(std::span(to_trainer).first(size))) << size;
  to_trainer.push_back({});
  EXPECT_FALSE(parse_to_trainer(to_trainer));
}

TEST_F(PoolRecord, FlippedBitIsRefusedOrSeen) {
  const auto to_worker = write_to_worker(request());
  for (size_t bit = 0; bit < 8 * kToWorkerHeadBytes; ++bit) {
    auto flipped = to_worker;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_to_worker(flipped);
    if (!parsed) continue;
    EXPECT_EQ(write_to_worker(parsed.value()), flipped);
  }
  const auto to_trainer = write_to_trainer(answer());
  for (size_t bit = 0; bit < 8 * kToTrainerHeadBytes; ++bit) {
    auto flipped = to_trainer;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_to_trainer(flipped);
    if (!parsed) continue;
    EXPECT_EQ(write_to_trainer(parsed.value()), flipped);
  }
}

TEST_F(PoolRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  auto part = write_to_worker(request());
  part[4] = std::byte{99};
  const auto parsed = parse_to_worker(part);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  EXPECT_NE(parsed.error().message.find("version 99"), std::string::npos);
}

// They stayed in whatever memory the messages had been in.
TEST_F(PoolRecord, HalvesOfALinksKeysAreWipedWithTheMessagesThatHaveThem) {
  const std::span<const std::byte> offered = offer_.nonce;
  const std::span<const std::byte> granted = grant_.nonce;
  EXPECT_FALSE(test::leaves<SealOffer>(offered, offer_));
  EXPECT_FALSE(test::leaves<SealGrant>(granted, grant_));
  EXPECT_FALSE(test::leaves<PoolRequest>(offered, hello()));
  EXPECT_FALSE(test::leaves<PoolAnswer>(granted, welcome()));
}

}  // namespace
}  // namespace penstock::wire
