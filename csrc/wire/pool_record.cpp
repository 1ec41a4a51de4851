// SPDX-License-Identifier: Apache-2.0
#include "wire/pool_record.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "wire/frame.h"
#include "wire/message.h"

namespace penstock::wire {
namespace {

constexpr uint8_t kFlagLaneStart = 1;
constexpr uint8_t kFlagContinued = 2;
constexpr uint8_t kFlagFresh = 1;
constexpr uint8_t kFlagInSlab = 2;

struct ToWorkerHead {
  uint32_t magic = kToWorkerMagic;
  uint16_t version = kPoolVersion;
  uint8_t kind = 0;
  uint8_t flags = 0;
  uint64_t trainer_id = 0;
  uint32_t link = 0;
  uint32_t lane = 0;
  uint64_t stamp = 0;
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t count = 0;
  uint64_t epoch_seed = 0;
  uint64_t index_bytes = 0;
  uint64_t state_bytes = 0;
  uint8_t index_kind = 0;
  uint8_t blob_count = 0;
  uint16_t link_mb_per_s = 0;
  uint32_t seeds_bytes = 0;
  uint64_t first_place = 0;
};
static_assert(sizeof(ToWorkerHead) == kToWorkerHeadBytes);

struct ToTrainerHead {
  uint32_t magic = kToTrainerMagic;
  uint16_t version = kPoolVersion;
  uint8_t kind = 0;
  uint8_t flags = 0;
  uint64_t worker_id = 0;
  uint32_t link = 0;
  uint32_t incarnation = 0;
  uint64_t stamp = 0;
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  uint32_t state_bytes = 0;
  uint8_t answer_kind = 0;
  uint8_t answer_flags = 0;
  uint8_t cpu_share = 0;
  uint8_t reserved = 0;
  uint64_t sent_at = 0;
  uint64_t cpu_ns = 0;
  uint64_t energy_uj = kUnknownEnergy;
  uint32_t sample_count = 0;
  SampleTimes samples{};
  uint32_t zero = 0;
  uint64_t dataset_size = kSizeUnknown;
};
static_assert(sizeof(ToTrainerHead) == kToTrainerHeadBytes);

constexpr std::string_view kOfTrainer = "a message of a pool trainer";
constexpr std::string_view kOfWorker = "a message of a pool worker";

template <typename Head>
Result<Head> read_pool_head(std::span<const std::byte> part, uint32_t magic, uint8_t kind_max, uint8_t flags_max,
                            std::string_view subject) {
  auto head =
      read_head<Head>(part, {.magic = magic, .version = kPoolVersion, .kind_max = kind_max, .subject = subject});
  if (!head) return head;
  if ((head.value().flags & ~flags_max) != 0) return malformed(subject, "unknown flags");
  if (part.size() - sizeof(Head) > kPoolBodyBytesMax) {
    return Fault{Errc::kTooLarge, std::string(subject) + " has " + std::to_string(part.size() - sizeof(Head)) +
                                      " bytes after its header, above the cap of " + std::to_string(kPoolBodyBytesMax)};
  }
  return head;
}

template <typename Head>
std::vector<std::byte> joined(const Head& head, std::initializer_list<std::span<const std::byte>> bodies) {
  auto part = message_of(head, bodies);
  PENSTOCK_ASSERT(part.size() <= kPartBytesMax, "a message of ", part.size(), " bytes");
  return part;
}

// The cipher, or the set of ciphers, and the nonce.
constexpr size_t kSealHalfBytes = 1 + kSealNonceBytes;

WipedArray<kSealHalfBytes> write_seal_half(uint8_t cipher, const SealNonce& nonce) {
  WipedArray<kSealHalfBytes> bytes{std::byte{cipher}};
  std::copy(nonce.begin(), nonce.end(), bytes.begin() + 1);
  return bytes;
}

// Of a hello: the offer, and the secret of the trainer's run.
constexpr size_t kHelloBytes = kSealHalfBytes + kRunSecretBytes;

Result<SealOffer> parse_offer(std::span<const std::byte> body) {
  if (body.size() != kHelloBytes) return malformed(kOfTrainer, "a hello has no key offer, or no secret");
  SealOffer offer{.ciphers = static_cast<uint8_t>(body.front())};
  if (offer.ciphers == 0 || (offer.ciphers & ~kSealCiphers) != 0) return malformed(kOfTrainer, "unknown ciphers");
  const auto nonce = body.subspan(1, kSealNonceBytes);
  std::copy(nonce.begin(), nonce.end(), offer.nonce.begin());
  return offer;
}

Result<SealGrant> parse_grant(std::span<const std::byte> body) {
  constexpr size_t kFixedBytes = kSealHalfBytes + sizeof(Numerics);
  if (body.size() <= kFixedBytes || body.size() > kFixedBytes + kDataEndpointBytesMax)
    return malformed(kOfWorker, "a welcome does not specify the encryption and address of chunks");
  const auto cipher = static_cast<uint8_t>(body.front());
  if (cipher == 0 || cipher > static_cast<uint8_t>(SealCipher::kChaCha20Poly1305))
    return malformed(kOfWorker, "unknown cipher");
  SealGrant grant{.cipher = static_cast<SealCipher>(cipher)};
  const auto nonce = body.subspan(1, kSealNonceBytes);
  std::copy(nonce.begin(), nonce.end(), grant.nonce.begin());
  std::memcpy(&grant.numerics, body.data() + kSealHalfBytes, sizeof grant.numerics);
  const auto endpoint = body.subspan(kFixedBytes);
  grant.data_endpoint.assign(reinterpret_cast<const char*>(endpoint.data()), endpoint.size());
  return grant;
}

struct SlabPlaceRecord {
  uint32_t arena_id = 0;
  uint32_t slab_index = 0;
  uint32_t generation = 0;
  uint32_t is_transient = 0;
  uint64_t slab_bytes = 0;
};
static_assert(sizeof(SlabPlaceRecord) == 24);

Result<SlabPlace> parse_place(std::span<const std::byte> body) {
  SlabPlaceRecord record;
  if (body.size() != sizeof record) return malformed(kOfWorker, "a batch does not specify its slab");
  std::memcpy(&record, body.data(), sizeof record);
  if (record.is_transient > 1) return malformed(kOfWorker, "an arena is neither permanent nor transient");
  return SlabPlace{.arena_id = record.arena_id,
                   .slab_index = record.slab_index,
                   .generation = record.generation,
                   .is_transient = record.is_transient == 1,
                   .slab_bytes = record.slab_bytes};
}

// Whether the body of such a message is the reason for a refusal or a death.
bool is_reason(ToTrainer::Kind kind) {
  return kind == ToTrainer::Kind::kRefused || kind == ToTrainer::Kind::kDeclined || kind == ToTrainer::Kind::kDied;
}

}  // namespace

std::vector<std::byte> write_to_worker(const PoolRequest& request) {
  const ToWorker& m = request.message;
  const ToWorkerHead head{
      .kind = static_cast<uint8_t>(m.kind),
      .flags = static_cast<uint8_t>((m.is_lane_start ? kFlagLaneStart : 0) | (m.is_continued ? kFlagContinued : 0)),
      .trainer_id = m.trainer_id,
      .link = m.link,
      .lane = m.lane,
      .stamp = m.stamp,
      .sequence = m.key.sequence,
      .epoch = m.key.epoch,
      .count = m.count,
      .epoch_seed = request.epoch_seed,
      .index_bytes = request.indices.size(),
      .state_bytes = request.state.size(),
      .index_kind = static_cast<uint8_t>(request.index_kind),
      .blob_count = static_cast<uint8_t>(request.blobs.size()),
      .link_mb_per_s = request.link_mb_per_s,
      .seeds_bytes = static_cast<uint32_t>(request.seeds.size()),
      .first_place = request.first_place};
  PENSTOCK_ASSERT(request.blobs.size() <= kRequestBlobCountMax);
  PENSTOCK_ASSERT((m.kind == ToWorker::Kind::kHello) == request.offer.has_value(), "every hello must offer keys");
  if (request.offer)
    return joined(head, {write_seal_half(request.offer->ciphers, request.offer->nonce), request.secret});
  return joined(head, {request.indices, request.seeds, request.state, std::as_bytes(request.blobs)});
}

Result<PoolRequest> parse_to_worker(std::span<const std::byte> part) {
  constexpr auto kKindMax = static_cast<uint8_t>(ToWorker::Kind::kBye);
  const auto read =
      read_pool_head<ToWorkerHead>(part, kToWorkerMagic, kKindMax, kFlagLaneStart | kFlagContinued, kOfTrainer);
  if (!read) return read.error();
  const ToWorkerHead& head = read.value();
  const auto body = part.subspan(sizeof head);
  const bool is_hello = head.kind == static_cast<uint8_t>(ToWorker::Kind::kHello);
  if (head.trainer_id == 0) return malformed(kOfTrainer, "it has no sender");
  if (head.index_kind > static_cast<uint8_t>(IndexKind::kPickle))
    return malformed(kOfTrainer, "unknown kind of indices");
  if (head.blob_count > kRequestBlobCountMax) return malformed(kOfTrainer, "it names too many blobs");
  const uint64_t blob_bytes = head.blob_count * sizeof(BlobId);
  uint64_t left = is_hello ? 0 : body.size();
  for (const uint64_t bytes : {head.index_bytes, uint64_t{head.seeds_bytes}, head.state_bytes, blob_bytes}) {
    if (bytes > left) return malformed(kOfTrainer, "its body length does not match its header");
    left -= bytes;
  }
  if (left != 0) return malformed(kOfTrainer, "its body length does not match its header");
  if (head.kind != static_cast<uint8_t>(ToWorker::Kind::kRequest) &&
      ((!is_hello && !body.empty()) || head.index_kind != 0))
    return malformed(kOfTrainer, "it has indices but is not a request");
  const auto index_kind = static_cast<IndexKind>(head.index_kind);
  if (index_kind == IndexKind::kInteger && head.index_bytes != 8)
    return malformed(kOfTrainer, "a single index is not 8 bytes long");
  if (index_kind == IndexKind::kIntegers && head.index_bytes % 8 != 0)
    return malformed(kOfTrainer, "its indices are not 8 bytes each");
  const ToWorker message{.kind = static_cast<ToWorker::Kind>(head.kind),
                         .trainer_id = head.trainer_id,
                         .link = head.link,
                         .stamp = head.stamp,
                         .key = {.epoch = head.epoch, .sequence = head.sequence},
                         .lane = head.lane,
                         .is_lane_start = (head.flags & kFlagLaneStart) != 0,
                         .is_continued = (head.flags & kFlagContinued) != 0,
                         .count = head.count};
  if (is_hello) {
    auto offer = parse_offer(body);
    if (!offer) return offer.error();
    PoolRequest request{.message = message, .epoch_seed = head.epoch_seed, .offer = offer.value()};
    const auto secret = body.last(kRunSecretBytes);
    std::copy(secret.begin(), secret.end(), request.secret.begin());
    return request;
  }
  return PoolRequest{.message = message,
                     .index_kind = index_kind,
                     .epoch_seed = head.epoch_seed,
                     .first_place = head.first_place,
                     .link_mb_per_s = head.link_mb_per_s,
                     .indices = body.first(head.index_bytes),
                     .seeds = body.subspan(head.index_bytes, head.seeds_bytes),
                     .state = body.subspan(head.index_bytes + head.seeds_bytes, head.state_bytes),
                     .blobs = blob_ids(body.last(blob_bytes))};
}

std::vector<std::byte> write_to_trainer(const PoolAnswer& answer) {
  const ToTrainer& m = answer.message;
  const ToTrainerHead head{
      .kind = static_cast<uint8_t>(m.kind),
      .flags = static_cast<uint8_t>((m.is_fresh ? kFlagFresh : 0) | (answer.place ? kFlagInSlab : 0)),
      .worker_id = answer.worker_id,
      .link = m.link,
      .incarnation = answer.incarnation,
      .stamp = m.stamp,
      .sequence = m.key.sequence,
      .epoch = m.key.epoch,
      .record_bytes = answer.record_bytes,
      .payload_bytes = answer.payload_bytes,
      .fetch_time = answer.fetch_time,
      .prefix_time = answer.prefix_time,
      .state_bytes = static_cast<uint32_t>(answer.state.size()),
      .answer_kind = static_cast<uint8_t>(answer.kind),
      .answer_flags = answer.flags,
      .cpu_share = answer.cpu_share,
      .sent_at = answer.sent_at,
      .cpu_ns = answer.meter.cpu_ns,
      .energy_uj = answer.meter.energy_uj,
      .sample_count = answer.sample_count,
      .samples = answer.samples,
      .dataset_size = answer.dataset_size};
  PENSTOCK_ASSERT((m.kind == ToTrainer::Kind::kWelcome) == answer.grant.has_value(), "every welcome must grant keys");
  if (const auto& grant = answer.grant; grant) {
    const auto endpoint = std::as_bytes(std::span(grant->data_endpoint));
    return joined(head, {write_seal_half(static_cast<uint8_t>(grant->cipher), grant->nonce),
                         std::as_bytes(std::span(grant->numerics)), endpoint});
  }
  PENSTOCK_ASSERT(!answer.place || answer.kind == AnswerKind::kBatch, "only a batch can be in a slab");
  if (const auto& place = answer.place; place) {
    const SlabPlaceRecord record{.arena_id = place->arena_id,
                                 .slab_index = place->slab_index,
                                 .generation = place->generation,
                                 .is_transient = place->is_transient ? 1u : 0u,
                                 .slab_bytes = place->slab_bytes};
    return joined(head, {std::as_bytes(std::span(&record, 1)), answer.state});
  }
  const auto body = is_reason(m.kind) ? answer.body.first(std::min(answer.body.size(), kReasonBytesMax)) : answer.body;
  return joined(head, {body, answer.state});
}

Result<PoolAnswer> parse_to_trainer(std::span<const std::byte> part) {
  constexpr auto kKindMax = static_cast<uint8_t>(ToTrainer::Kind::kDied);
  const auto read = read_pool_head<ToTrainerHead>(part, kToTrainerMagic, kKindMax, kFlagFresh | kFlagInSlab, kOfWorker);
  if (!read) return read.error();
  const ToTrainerHead& head = read.value();
  if (head.reserved != 0 || head.zero != 0) return malformed(kOfWorker, "a reserved byte is not zero");
  if (head.sent_at > kClockMax) return malformed(kOfWorker, "its clock value is impossibly large");
  const auto body = part.subspan(sizeof head);
  const auto kind = static_cast<ToTrainer::Kind>(head.kind);
  if (head.state_bytes > body.size()) return malformed(kOfWorker, "its state length does not match its header");
  const bool is_error = head.answer_kind == static_cast<uint8_t>(AnswerKind::kError);
  const bool is_welcome = kind == ToTrainer::Kind::kWelcome;
  const bool is_in_slab = (head.flags & kFlagInSlab) != 0;
  const bool has_text = is_error || is_reason(kind) || is_welcome || is_in_slab;
  if (is_reason(kind) && body.size() > kReasonBytesMax) {
    return Fault{Errc::kTooLarge, "a reason of " + std::to_string(body.size()) + " bytes is above the cap of " +
                                      std::to_string(kReasonBytesMax)};
  }
  if (!has_text && head.state_bytes != body.size()) return malformed(kOfWorker, "it has a text but is not an error");
  if (head.answer_kind > static_cast<uint8_t>(AnswerKind::kError))
    return malformed(kOfWorker, "unknown kind of answer");
  const bool is_batch = head.answer_kind == static_cast<uint8_t>(AnswerKind::kBatch);
  if (!is_batch && !is_error && head.state_bytes != 0)
    return malformed(kOfWorker, "it has a state but is neither a batch nor an error");
  if ((kind == ToTrainer::Kind::kAnswer) != (head.answer_kind != 0))
    return malformed(kOfWorker, "its kind does not match its kind of answer");
  if ((head.answer_flags & ~kPoolAnswerFlags) != 0) return malformed(kOfWorker, "unknown flags of an answer");
  if (head.payload_bytes > kPoolPayloadBytesMax) {
    return Fault{Errc::kTooLarge, "a batch of " + std::to_string(head.payload_bytes) + " bytes is above the cap of " +
                                      std::to_string(kPoolPayloadBytesMax)};
  }
  if (!is_batch && head.payload_bytes != 0) return malformed(kOfWorker, "it has a payload but is not a batch");
  if (head.record_bytes > head.payload_bytes) return malformed(kOfWorker, "its record is larger than its payload");
  if (!is_batch && head.sample_count != 0) return malformed(kOfWorker, "it has samples but is not a batch");
  if (is_batch && head.record_bytes == 0) return malformed(kOfWorker, "a batch has no record");
  if (is_in_slab && !is_batch) return malformed(kOfWorker, "it is in a slab but is not a batch");
  std::optional<SealGrant> grant;
  if (is_welcome) {
    auto parsed = parse_grant(body);
    if (!parsed) return parsed.error();
    grant = std::move(parsed).value();
  }
  std::optional<SlabPlace> place;
  if (is_in_slab) {
    auto parsed = parse_place(body.first(body.size() - head.state_bytes));
    if (!parsed) return parsed.error();
    place = parsed.value();
  }
  return PoolAnswer{
      .message = {.kind = kind,
                  .link = head.link,
                  .stamp = head.stamp,
                  .key = {.epoch = head.epoch, .sequence = head.sequence},
                  .is_fresh = (head.flags & kFlagFresh) != 0},
      .worker_id = head.worker_id,
      .incarnation = head.incarnation,
      .kind = static_cast<AnswerKind>(head.answer_kind),
      .flags = head.answer_flags,
      .record_bytes = head.record_bytes,
      .payload_bytes = head.payload_bytes,
      .fetch_time = head.fetch_time,
      .prefix_time = head.prefix_time,
      .samples = head.samples,
      .cpu_share = head.cpu_share,
      .sent_at = head.sent_at,
      .meter = {.cpu_ns = head.cpu_ns, .energy_uj = head.energy_uj},
      .sample_count = head.sample_count,
      .dataset_size = head.dataset_size,
      .body = is_welcome || is_in_slab ? std::span<const std::byte>() : body.first(body.size() - head.state_bytes),
      .state = body.last(head.state_bytes),
      .grant = std::move(grant),
      .place = place};
}

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
