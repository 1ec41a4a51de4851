// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between a trainer and a pool worker, as bytes. PoolRequest and PoolAnswer are one part each, a head of
// fixed size followed by variable bytes. The bytes of a batch are sent in chunks over a separate connection, the pool's
// data connection, whose messages are at the end. PROTOCOL.md is the specification.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/numerics.h"
#include "base/result.h"
#include "wire/blob_record.h"
#include "wire/message.h"
#include "wire/reports.h"

namespace penstock::wire {

constexpr uint32_t kToWorkerMagic = 0x31574e50;   // "PNW1"
constexpr uint32_t kToTrainerMagic = 0x31544e50;  // "PNT1"
constexpr uint16_t kPoolVersion = 10;
constexpr int kCpuShareUnit = 64;  // so that four CPUs fit a byte
constexpr size_t kToWorkerHeadBytes = 88;
constexpr size_t kToTrainerHeadBytes = 120;

// The limit of the variable bytes after a head.
constexpr uint64_t kPoolBodyBytesMax = kPartBytesMax - kToTrainerHeadBytes;
static_assert(kToWorkerHeadBytes <= kToTrainerHeadBytes);
constexpr size_t kRequestBlobCountMax = 64;
// The largest value of a worker's clock: more than it can have run for, and small enough that differences do not
// overflow.
constexpr uint64_t kClockMax = uint64_t{1} << 61;
// The flags of a descriptor that describe a batch, not the memory that contains it.
constexpr uint8_t kPoolAnswerFlags = kBatchRaises | kBatchThreadsDrew | kBatchCompiled | kBatchDatasetStays;
constexpr size_t kReasonBytesMax = 4096;  // of why a worker refuses or declines a trainer, or how its process ended
constexpr size_t kSealNonceBytes = 32;
constexpr size_t kDataEndpointBytesMax = 256;

// The ciphers that seal a link's chunks. A message contains the number itself; a set has one bit per number.
enum class SealCipher : uint8_t { kAes256Gcm = 1, kChaCha20Poly1305 = 2 };
constexpr uint8_t kSealCiphers = 0b11;
constexpr uint8_t cipher_bit(SealCipher cipher) {
  return static_cast<uint8_t>(1u << (static_cast<uint8_t>(cipher) - 1));
}

// Half of the input from which a link's keys are derived, so it is as secret as the keys.
using SealNonce = WipedArray<kSealNonceBytes>;

// Of a hello: the trainer's contribution to the keys of the link's chunks. The worker contributes the other half.
struct SealOffer {
  uint8_t ciphers = 0;  // the set of ciphers that it can open fast, not empty
  SealNonce nonce{};

  friend bool operator==(const SealOffer&, const SealOffer&) = default;
};

// Of a welcome.
struct SealGrant {
  SealCipher cipher = SealCipher::kAes256Gcm;
  SealNonce nonce{};
  std::string data_endpoint{};  // the address for the trainer's connection for chunks
  Numerics numerics{};          // of the worker's kernels

  friend bool operator==(const SealGrant&, const SealGrant&) = default;
};

// To a worker. The fields after `epoch_seed` belong to a request.
struct PoolRequest {
  ToWorker message;
  IndexKind index_kind = IndexKind::kNone;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;    // of its first sample in the order of the epoch
  uint16_t link_mb_per_s = 0;  // the rate at which batches reach the trainer, at least 1; 0: unknown
  std::span<const std::byte> indices = {};
  std::span<const std::byte> seeds = {};  // the seeds of the epoch's random numbers; a pickle
  std::span<const std::byte> state = {};  // from which a lane that starts here continues; a pickle
  std::span<const BlobId> blobs = {};     // the required parts: the job, then its prefixes
  std::optional<SealOffer> offer = {};    // of a hello
  RunSecret secret = {};                  // of a hello: of the trainer's run
};

// The size of a worker's dataset, sent with a batch to a trainer without a dataset: the number of samples, kNoSize for
// an iterable one, or kSizeUnknown.
constexpr uint64_t kSizeUnknown = ~uint64_t{0};
constexpr uint64_t kNoSize = kSizeUnknown - 1;

enum class AnswerKind : uint8_t {
  kNone = 0,   // not an answer
  kBatch = 1,  // the chunks contain a batch, and its last `record_bytes` are the batch record
  kEnd = 2,    // the shard is exhausted
  kError = 3,  // `body` is the text of the exception: the name of its type, a zero byte, and the rest
};

// To a trainer.
struct PoolAnswer {
  ToTrainer message;
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  AnswerKind kind = AnswerKind::kNone;
  uint8_t flags = 0;  // of the batch: kPoolAnswerFlags
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;  // of the whole batch, its record included
  uint32_t fetch_time = 0;     // in units of kTimeUnit
  uint32_t prefix_time = 0;
  SampleTimes samples{};
  uint8_t cpu_share = 0;      // CPU time of the process per fetch_time, in units of 1 / kCpuShareUnit; saturates at 255
  uint64_t sent_at = 0;       // nanoseconds of the worker's clock, with an arbitrary origin; at most kClockMax
  WorkerMeter meter{};        // when it was sent
  uint32_t sample_count = 0;  // in a batch; 0 for a recall
  uint64_t dataset_size = kSizeUnknown;   // of a batch: of its dataset
  std::span<const std::byte> body = {};   // of an error, or the reason for a refusal or a death
  std::span<const std::byte> state = {};  // of the dataset after the batch, or after the error in its place
  std::optional<SealGrant> grant = {};    // of a welcome
  std::optional<SlabPlace> place = {};    // of a batch that is not sent in chunks
};

// Writers must respect the caps; a reason above its cap is truncated.
std::vector<std::byte> write_to_worker(const PoolRequest& request);
std::vector<std::byte> write_to_trainer(const PoolAnswer& answer);

// The spans of the result point into `part`. kMalformed, kTooLarge, or kMismatch for another version.
Result<PoolRequest> parse_to_worker(std::span<const std::byte> part);
Result<PoolAnswer> parse_to_trainer(std::span<const std::byte> part);

constexpr uint32_t kPieceMagic = 0x31504e50;  // "PNP1"
constexpr uint16_t kPieceVersion = 1;
constexpr size_t kPieceHeadBytes = 64;
constexpr size_t kSealTagBytes = 16;  // of AES-GCM and of ChaCha20-Poly1305
// On a slow link the chunks show that the worker is alive, so a chunk must be transferred in less than a lease.
constexpr uint64_t kPieceBytesMax = uint64_t{1} << 20;
constexpr uint64_t kPieceMessageBytesMax = kPieceHeadBytes + kPieceBytesMax + kSealTagBytes;
constexpr uint64_t kPoolPayloadBytesMax = uint64_t{1} << 34;  // of a batch and its record

// The head of a message of a data connection: one part, consisting of this unencrypted head of 64 bytes and the
// encrypted bytes after it, whose seal covers the head as well (net/seal.h). The bytes of a batch are sent in chunks,
// in order.
struct PieceHead {
  enum class Kind : uint8_t {
    kJoin = 1,  // a trainer's first and only message: this is the connection for the chunks of the link
    kPiece,     // from a worker: some of the bytes of a batch
  };
  Kind kind = Kind::kPiece;
  uint64_t sender = 0;  // the id of the trainer or of the worker
  uint32_t link = 0;
  uint64_t counter = 0;  // of the messages sealed with one key, from 1
  BatchKey key{};
  uint64_t payload_bytes = 0;   // of the whole batch, its record included
  uint64_t payload_offset = 0;  // the position of this chunk

  friend bool operator==(const PieceHead&, const PieceHead&) = default;
};

using PieceHeadBytes = std::array<std::byte, kPieceHeadBytes>;
PieceHeadBytes write_piece_head(const PieceHead& head);

// A received message. None of it is trusted before its seal is verified.
struct SealedPiece {
  PieceHead head;
  std::span<const std::byte> head_bytes;  // 64
  std::span<const std::byte> sealed;      // the bytes of the chunk, and the tag

  size_t size() const { return sealed.size() - kSealTagBytes; }
};

// The spans of the result point into `message`. kMalformed, kTooLarge, or kMismatch for another version.
Result<SealedPiece> parse_piece(std::span<const std::byte> message);

}  // namespace penstock::wire
