// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between a trainer and a worker of a pool: one part, of a head of fixed size and variable bytes behind
// it. The bytes of a batch come in pieces over a connection of their own (piece_record.h). PROTOCOL.md is the
// specification.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/numerics.h"
#include "base/result.h"
#include "base/wiped.h"
#include "wire/batch_facts.h"
#include "wire/blob_record.h"
#include "wire/data_message.h"
#include "wire/message_limits.h"
#include "wire/piece_record.h"
#include "wire/reports.h"
#include "wire/slab_place.h"

namespace penstock::wire {

constexpr uint32_t kToWorkerMagic = 0x31574e50;   // "PNW1"
constexpr uint32_t kToTrainerMagic = 0x31544e50;  // "PNT1"
constexpr uint16_t kPoolVersion = 9;
constexpr int kCpuShareUnit = 64;  // so that four CPUs fit a byte
constexpr size_t kToWorkerHeadBytes = 88;
constexpr size_t kToTrainerHeadBytes = 120;

// The most variable bytes behind a head.
constexpr uint64_t kPoolBodyBytesMax = kPartBytesMax - kToTrainerHeadBytes;
static_assert(kToWorkerHeadBytes <= kToTrainerHeadBytes);
constexpr size_t kRequestBlobCountMax = 64;
// What a worker's clock may show: more than it can have run for, and so little that differences do not overflow.
constexpr uint64_t kClockMax = uint64_t{1} << 61;
// The flags of a descriptor that say something of a batch, and not of the memory in which it lies.
constexpr uint8_t kPoolAnswerFlags = kBatchRaises | kBatchThreadsDrew | kBatchCompiled | kBatchDatasetStays;
constexpr size_t kReasonBytesMax = 4096;  // of why a worker refuses or declines a trainer, or how its process ended
constexpr size_t kSealNonceBytes = 32;
constexpr size_t kDataEndpointBytesMax = 256;

// How the pieces of a link are sealed. Each number stands for itself in a message, and for a bit in a set.
enum class SealCipher : uint8_t { kAes256Gcm = 1, kChaCha20Poly1305 = 2 };
constexpr uint8_t kSealCiphers = 0b11;
constexpr uint8_t cipher_bit(SealCipher cipher) {
  return static_cast<uint8_t>(1u << (static_cast<uint8_t>(cipher) - 1));
}

// Half of what the keys of a link follow from, so as secret as they are.
using SealNonce = WipedArray<kSealNonceBytes>;

// Of a hello: what the trainer brings to the keys of the link's pieces. The other half is the worker's.
struct SealOffer {
  uint8_t ciphers = 0;  // a set of those that it can open fast, not empty
  SealNonce nonce{};

  friend bool operator==(const SealOffer&, const SealOffer&) = default;
};

// Of a welcome.
struct SealGrant {
  SealCipher cipher = SealCipher::kAes256Gcm;
  SealNonce nonce{};
  std::string data_endpoint{};  // where the trainer connects for the pieces
  Numerics numerics{};          // of the worker's kernels

  friend bool operator==(const SealGrant&, const SealGrant&) = default;
};

// To a worker. The fields after `epoch_seed` belong to a request.
struct PoolRequest {
  ToWorker message;
  IndexKind index_kind = IndexKind::kNone;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;    // of its first sample in the order of the epoch
  uint16_t link_mb_per_s = 0;  // at which batches reach the trainer, at least 1; 0: not known
  std::span<const std::byte> indices = {};
  std::span<const std::byte> seeds = {};  // the seeds of the epoch's random numbers; a pickle
  std::span<const std::byte> state = {};  // where a lane goes on that starts here; a pickle
  std::span<const BlobId> blobs = {};     // the parts that it needs: the job, then its prefixes
  std::optional<SealOffer> offer = {};    // of a hello
  RunSecret secret = {};                  // of a hello: the trainer's run's
};

// What a worker tells of its dataset with a batch, where its trainer has no dataset of its own: its number of samples,
// kNoSize of an iterable one, or kSizeUntold.
constexpr uint64_t kSizeUntold = ~uint64_t{0};
constexpr uint64_t kNoSize = kSizeUntold - 1;

enum class AnswerKind : uint8_t {
  kNone = 0,   // this is no answer
  kBatch = 1,  // the pieces are those of a batch, and the last `record_bytes` of it are the batch record
  kEnd = 2,    // the shard has no more
  kError = 3,  // `body` is the text of the exception: its type's name, a zero, and the rest
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
  uint8_t cpu_share = 0;  // of fetch_time, that the process was on CPUs, in parts of kCpuShareUnit; 255 and above: 255
  uint64_t sent_at = 0;   // nanoseconds of the worker's own clock, which began at any time; kClockMax at most
  WorkerMeter meter{};    // when it was sent
  uint32_t sample_count = 0;              // in a batch; 0 for a recall
  uint64_t dataset_size = kSizeUntold;    // of a batch: of the dataset that it is of
  std::span<const std::byte> body = {};   // of an error, or the reason of a refusal or a death
  std::span<const std::byte> state = {};  // the dataset's after the batch, or after the error in its place
  std::optional<SealGrant> grant = {};    // of a welcome
  std::optional<SlabPlace> place = {};    // of a batch that does not cross in pieces
};

// Writers must keep the caps; a reason above its cap is cut off.
std::vector<std::byte> write_to_worker(const PoolRequest& request);
std::vector<std::byte> write_to_trainer(const PoolAnswer& answer);

// The spans of the result lie in `part`. kMalformed, kTooLarge, or kMismatch for another version.
Result<PoolRequest> parse_to_worker(std::span<const std::byte> part);
Result<PoolAnswer> parse_to_trainer(std::span<const std::byte> part);

}  // namespace penstock::wire
