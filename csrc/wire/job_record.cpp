// SPDX-License-Identifier: Apache-2.0
#include "wire/job_record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/result.h"
#include "wire/frame.h"
#include "wire/message.h"
#include "wire/reports.h"

namespace penstock::wire {
namespace {

constexpr uint8_t kJobLaneStart = 1;
constexpr uint8_t kJobNamed = 2;
constexpr uint8_t kPlaced = 1;
constexpr uint8_t kTransient = 2;
constexpr uint8_t kNewArena = 4;
constexpr uint64_t kStatesIndexBytes = 2 * sizeof(int64_t);
constexpr uint8_t kErrcMax = static_cast<uint8_t>(Errc::kFailed);

struct ToJobHead {
  uint32_t magic = kToJobMagic;
  uint16_t version = kJobVersion;
  uint8_t kind = 0;
  uint8_t flags = 0;
  uint64_t trainer_id = 0;
  uint64_t tenancy = 0;
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t lane = 0;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;
  double link_bytes_per_s = 0;
  uint64_t blob_bytes = 0;
  uint64_t index_bytes = 0;
  uint64_t state_bytes = 0;
  uint32_t seeds_bytes = 0;
  uint32_t blob_count = 0;
  uint8_t index_kind = 0;
  uint8_t error = 0;
  uint8_t reserved[6] = {};
};
static_assert(sizeof(ToJobHead) == kToJobHeadBytes);

struct FromJobHead {
  uint32_t magic = kFromJobMagic;
  uint16_t version = kJobVersion;
  uint8_t kind = 0;
  uint8_t answer = 0;
  uint8_t flags = 0;
  uint8_t cpu_share = 0;
  uint8_t placed = 0;  // kPlaced, kTransient, kNewArena
  uint8_t reserved = 0;
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  SampleTimes samples{};
  uint32_t sample_count = 0;
  uint32_t arena_id = 0;
  uint64_t dataset_size = kSizeUnknown;
  uint32_t slab_index = 0;
  uint32_t generation = 0;
  uint64_t slab_bytes = 0;
  uint64_t state_bytes = 0;
  uint32_t text_bytes = 0;
  uint32_t epoch = 0;
  uint64_t sequence = 0;
};
static_assert(sizeof(FromJobHead) == kFromJobHeadBytes);

struct WarmHead {
  uint32_t magic = kWarmMagic;
  uint16_t version = kJobVersion;
  uint8_t kind = 0;
  uint8_t reserved = 0;
  uint64_t job = 0;
  int32_t pid = 0;
  int32_t status = 0;
  uint16_t torch = 0;
  uint8_t job_kinds = 0;
  uint8_t reserved_end[13] = {};
};
static_assert(sizeof(WarmHead) == kWarmHeadBytes);

template <typename Head>
Result<Head> read_job_head(std::span<const std::byte> part, uint32_t magic, uint8_t kind_max,
                           std::string_view subject) {
  return read_head<Head>(part, {.magic = magic,
                                .version = kJobVersion,
                                .kind_max = kind_max,
                                .subject = subject,
                                .hint = "both processes must use the same installation of penstock"});
}

// Takes `bytes` from the front of `body`. Empty if it has fewer.
std::optional<std::span<const std::byte>> take_front(std::span<const std::byte>& body, uint64_t bytes) {
  if (bytes > body.size()) return std::nullopt;
  const auto taken = body.first(bytes);
  body = body.subspan(bytes);
  return taken;
}

template <size_t kCount>
bool are_zero(const uint8_t (&bytes)[kCount]) {
  return std::all_of(std::begin(bytes), std::end(bytes), [](uint8_t byte) { return byte == 0; });
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

template <typename Head>
std::array<std::byte, sizeof(Head)> bytes_of_head(const Head& head) {
  std::array<std::byte, sizeof(Head)> bytes;
  std::memcpy(bytes.data(), &head, sizeof head);
  return bytes;
}

ToJobHead head_of(const ToJob& message) {
  return ToJobHead{
      .kind = static_cast<uint8_t>(message.kind),
      .flags = static_cast<uint8_t>((message.is_lane_start ? kJobLaneStart : 0) | (message.is_named ? kJobNamed : 0)),
      .trainer_id = message.trainer_id,
      .tenancy = message.tenancy,
      .sequence = message.key.sequence,
      .epoch = message.key.epoch,
      .lane = message.lane,
      .epoch_seed = message.epoch_seed,
      .first_place = message.first_place,
      .link_bytes_per_s = message.link_bytes_per_s,
      .blob_bytes = message.blob_bytes,
      .index_bytes = message.indices.size(),
      .state_bytes = message.state.size(),
      .seeds_bytes = static_cast<uint32_t>(message.seeds.size()),
      .blob_count = static_cast<uint32_t>(message.blobs.size()),
      .index_kind = static_cast<uint8_t>(message.index_kind),
      .error = message.error};
}

FromJobHead head_of(const FromJob& message) {
  FromJobHead head{.kind = static_cast<uint8_t>(message.kind),
                   .answer = static_cast<uint8_t>(message.answer),
                   .flags = message.flags,
                   .cpu_share = message.cpu_share,
                   .record_bytes = message.record_bytes,
                   .payload_bytes = message.payload_bytes,
                   .fetch_time = message.fetch_time,
                   .prefix_time = message.prefix_time,
                   .samples = message.samples,
                   .sample_count = message.sample_count,
                   .dataset_size = message.dataset_size,
                   .state_bytes = message.state.size(),
                   .text_bytes = static_cast<uint32_t>(message.text.size()),
                   .epoch = message.key.epoch,
                   .sequence = message.key.sequence};
  if (message.place) {
    head.placed = static_cast<uint8_t>(kPlaced | (message.place->is_transient ? kTransient : 0) |
                                       (message.is_new_arena ? kNewArena : 0));
    head.arena_id = message.place->arena_id;
    head.slab_index = message.place->slab_index;
    head.generation = message.place->generation;
    head.slab_bytes = message.place->slab_bytes;
  }
  return head;
}

// Whether the indices, and the seeds of an epoch, have the lengths that their kind requires.
bool have_lengths_of_kind(const ToJobHead& head) {
  const auto kind = static_cast<ToJob::Kind>(head.kind);
  const auto index_kind = static_cast<IndexKind>(head.index_kind);
  if (index_kind == IndexKind::kInteger && head.index_bytes != sizeof(int64_t)) return false;
  if (index_kind == IndexKind::kIntegers && head.index_bytes % sizeof(int64_t) != 0) return false;
  if (kind == ToJob::Kind::kStates) return index_kind == IndexKind::kIntegers && head.index_bytes == kStatesIndexBytes;
  const bool is_epoch = kind == ToJob::Kind::kEpoch || kind == ToJob::Kind::kEarlyEpoch;
  return !is_epoch || head.seeds_bytes % sizeof(int64_t) == 0;
}

}  // namespace

std::array<std::byte, kToJobHeadBytes> to_job_head(const ToJob& message) { return bytes_of_head(head_of(message)); }

std::vector<std::byte> write_to_job(const ToJob& message) {
  return message_of(head_of(message),
                    {std::as_bytes(message.blobs), message.indices, message.seeds, message.state, message.body});
}

Result<ToJob> parse_to_job(std::span<const std::byte> part) {
  constexpr std::string_view kSubject = "a message of a trainer or server";
  const auto read = read_job_head<ToJobHead>(part, kToJobMagic, static_cast<uint8_t>(ToJob::Kind::kStates), kSubject);
  if (!read) return read.error();
  const ToJobHead& head = read.value();
  if ((head.flags & ~(kJobLaneStart | kJobNamed)) != 0 || !are_zero(head.reserved) || head.error > kErrcMax ||
      head.index_kind > static_cast<uint8_t>(IndexKind::kPickle) || head.blob_count > kRequestBlobCountMax)
    return malformed(kSubject, "a field is out of range");
  if (!have_lengths_of_kind(head)) return malformed(kSubject, "its integers are not 8 bytes each");
  auto body = part.subspan(sizeof head);
  const auto blobs = take_front(body, head.blob_count * sizeof(BlobId));
  const auto indices = blobs ? take_front(body, head.index_bytes) : std::nullopt;
  const auto seeds = indices ? take_front(body, head.seeds_bytes) : std::nullopt;
  const auto state = seeds ? take_front(body, head.state_bytes) : std::nullopt;
  if (!state) return malformed(kSubject, "it is shorter than the length in its header");
  return ToJob{.kind = static_cast<ToJob::Kind>(head.kind),
               .error = head.error,
               .is_lane_start = (head.flags & kJobLaneStart) != 0,
               .is_named = (head.flags & kJobNamed) != 0,
               .index_kind = static_cast<IndexKind>(head.index_kind),
               .trainer_id = head.trainer_id,
               .tenancy = head.tenancy,
               .key = {.epoch = head.epoch, .sequence = head.sequence},
               .lane = head.lane,
               .epoch_seed = head.epoch_seed,
               .first_place = head.first_place,
               .link_bytes_per_s = head.link_bytes_per_s,
               .blob_bytes = head.blob_bytes,
               .indices = *indices,
               .seeds = *seeds,
               .state = *state,
               .blobs = blob_ids(*blobs),
               .body = body};
}

std::array<std::byte, kFromJobHeadBytes> from_job_head(const FromJob& message) {
  return bytes_of_head(head_of(message));
}

std::vector<std::byte> write_from_job(const FromJob& message) {
  const bool is_blob_request = message.kind == FromJob::Kind::kBlobRequest;
  const auto blob = is_blob_request ? std::span<const std::byte>(message.blob) : std::span<const std::byte>();
  return message_of(head_of(message), {blob, message.text, message.state});
}

Result<FromJob> parse_from_job(std::span<const std::byte> part, uint64_t body_bytes_max) {
  constexpr std::string_view kSubject = "a message of a worker's process";
  const auto read =
      read_job_head<FromJobHead>(part, kFromJobMagic, static_cast<uint8_t>(FromJob::Kind::kStates), kSubject);
  if (!read) return read.error();
  const FromJobHead& head = read.value();
  const auto kind = static_cast<FromJob::Kind>(head.kind);
  const bool is_batch = head.answer == static_cast<uint8_t>(AnswerKind::kBatch);
  const bool is_placed = (head.placed & kPlaced) != 0;
  if (head.reserved != 0) return malformed(kSubject, "reserved bytes are not zero");
  if ((kind == FromJob::Kind::kResult) != (head.answer != 0) || head.answer > static_cast<uint8_t>(AnswerKind::kError))
    return malformed(kSubject, "a result requires a kind of answer, and vice versa");
  if ((head.flags & ~(kBatchFlags | kBatchKeepingFlags)) != 0 ||
      (head.placed & ~(kPlaced | kTransient | kNewArena)) != 0 || (!is_placed && head.placed != 0) ||
      (!is_batch && (head.flags != 0 || is_placed)))
    return malformed(kSubject, "unknown flags");
  if (is_batch != (head.payload_bytes != 0) || is_batch != (head.record_bytes != 0) ||
      head.record_bytes > head.payload_bytes || head.payload_bytes > kPoolPayloadBytesMax)
    return malformed(kSubject, "the sizes of its batch are inconsistent");
  if (head.samples.slowest_share == 0 && head.samples.slowest_place != 0)
    return malformed(kSubject, "the slowest sample has an index but no time");
  const bool has_samples =
      head.samples.dataset_time != 0 || head.samples.slowest_place != 0 || head.samples.slowest_share != 0;
  if (!is_batch && (has_samples || head.sample_count != 0 || head.prefix_time != 0))
    return malformed(kSubject, "it has a sample count but no batch");
  if (!is_placed && ((head.arena_id | head.slab_index | head.generation) != 0 || head.slab_bytes != 0))
    return malformed(kSubject, "it names a slab that contains no batch");
  const bool has_text = head.answer == static_cast<uint8_t>(AnswerKind::kError) || kind == FromJob::Kind::kDeclined;
  const bool has_state = kind == FromJob::Kind::kResult || kind == FromJob::Kind::kStates;
  if ((!has_text && head.text_bytes != 0) || (!has_state && head.state_bytes != 0))
    return malformed(kSubject, "it has a text or a state that its kind does not permit");
  if (head.text_bytes > body_bytes_max || head.state_bytes > body_bytes_max ||
      head.text_bytes + head.state_bytes > body_bytes_max) {
    return Fault{Errc::kTooLarge, "a message of a worker's process has " +
                                      std::to_string(head.text_bytes + head.state_bytes) +
                                      " bytes of texts and states, above the cap of " + std::to_string(body_bytes_max)};
  }
  auto body = part.subspan(sizeof head);
  const auto blob = take_front(body, kind == FromJob::Kind::kBlobRequest ? sizeof(BlobId) : 0);
  const auto text = blob ? take_front(body, head.text_bytes) : std::nullopt;
  const auto state = text ? take_front(body, head.state_bytes) : std::nullopt;
  if (!state) return malformed(kSubject, "it is shorter than the length in its header");
  if (body.size() != (is_batch && !is_placed ? head.payload_bytes : 0))
    return malformed(kSubject, "the length of its batch does not match its header");
  FromJob message{.kind = kind,
                  .answer = static_cast<AnswerKind>(head.answer),
                  .key = {.epoch = head.epoch, .sequence = head.sequence},
                  .flags = head.flags,
                  .cpu_share = head.cpu_share,
                  .record_bytes = head.record_bytes,
                  .payload_bytes = head.payload_bytes,
                  .fetch_time = head.fetch_time,
                  .prefix_time = head.prefix_time,
                  .samples = head.samples,
                  .sample_count = head.sample_count,
                  .dataset_size = head.dataset_size,
                  .text = *text,
                  .state = *state,
                  .payload = body};
  if (!blob->empty()) std::memcpy(message.blob.data(), blob->data(), sizeof message.blob);
  if (is_placed) {
    message.is_new_arena = (head.placed & kNewArena) != 0;
    message.place = SlabPlace{.arena_id = head.arena_id,
                              .slab_index = head.slab_index,
                              .generation = head.generation,
                              .is_transient = (head.placed & kTransient) != 0,
                              .slab_bytes = head.slab_bytes};
  }
  return message;
}

std::vector<std::byte> write_warm_message(const WarmMessage& message) {
  const WarmHead head{.kind = static_cast<uint8_t>(message.kind),
                      .job = message.job,
                      .pid = message.pid,
                      .status = message.status,
                      .torch = message.torch,
                      .job_kinds = message.job_kinds};
  const bool is_ready = message.kind == WarmMessage::Kind::kReady;
  const auto numerics = std::as_bytes(std::span(message.numerics));
  return message_of(head, {is_ready ? numerics : std::span<const std::byte>(), bytes_of(message.text)});
}

Result<WarmMessage> parse_warm_message(std::span<const std::byte> part) {
  constexpr std::string_view kSubject = "a message of a warm process or its server";
  const auto read = read_job_head<WarmHead>(part, kWarmMagic, static_cast<uint8_t>(WarmMessage::Kind::kEnd), kSubject);
  if (!read) return read.error();
  const WarmHead& head = read.value();
  if (head.reserved != 0 || !are_zero(head.reserved_end)) return malformed(kSubject, "reserved bytes are not zero");
  WarmMessage message{.kind = static_cast<WarmMessage::Kind>(head.kind),
                      .torch = head.torch,
                      .job_kinds = head.job_kinds,
                      .job = head.job,
                      .pid = head.pid,
                      .status = head.status};
  const bool is_ready = message.kind == WarmMessage::Kind::kReady;
  if ((head.job_kinds & ~kJobKinds) != 0 || is_ready != (head.job_kinds != 0))
    return malformed(kSubject, "it runs unknown kinds of jobs");
  auto body = part.subspan(sizeof head);
  if (is_ready) {
    const auto numerics = take_front(body, sizeof message.numerics);
    if (!numerics) return malformed(kSubject, "it is shorter than the length in its header");
    std::memcpy(message.numerics.data(), numerics->data(), sizeof message.numerics);
  }
  const bool has_text = is_ready || message.kind == WarmMessage::Kind::kFork;
  const size_t bytes_max = is_ready ? kAboutBytesMax : kLogNameBytesMax;
  if (body.size() > (has_text ? bytes_max : 0)) return malformed(kSubject, "its text is too long");
  message.text = {reinterpret_cast<const char*>(body.data()), body.size()};
  return message;
}

}  // namespace penstock::wire
