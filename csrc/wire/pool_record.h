// SPDX-License-Identifier: Apache-2.0
#pragma once
// The heads of the messages between a trainer and a worker of a pool: 80 bytes at the beginning of a message's first
// part, followed there by variable bytes. The bytes of a batch come in pieces, each the second part of a message: the
// last piece with the answer itself, the others in messages before it. PROTOCOL.md is the specification.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/blob_record.h"
#include "wire/data_message.h"
#include "wire/message.h"
#include "wire/message_limits.h"

namespace penstock::wire {

constexpr uint32_t kToWorkerMagic = 0x31574e50;   // "PNW1"
constexpr uint32_t kToTrainerMagic = 0x31544e50;  // "PNT1"
constexpr uint16_t kPoolVersion = 1;
constexpr size_t kPoolHeadBytes = 80;

// The most variable bytes behind a head.
constexpr uint64_t kPoolBodyBytesMax = kPartBytesMax - kPoolHeadBytes;
// Less beside a large state: both share kMessageBytesMax. On a slow link the pieces are the worker's signs of life, so
// a piece must cross it in less than a lease.
constexpr uint64_t kPieceBytesMax = uint64_t{1} << 20;
constexpr uint64_t kPoolPayloadBytesMax = uint64_t{1} << 34;  // of a batch and its record
constexpr size_t kRequestBlobCountMax = 64;
constexpr size_t kReasonBytesMax = 4096;  // of why a worker refuses or declines a trainer

// To a worker. The fields after `epoch_seed` belong to a request.
struct PoolRequest {
  ToWorker message;
  IndexKind index_kind = IndexKind::kNone;
  uint64_t epoch_seed = 0;
  std::span<const std::byte> indices = {};
  std::span<const std::byte> seeds = {};  // the seeds of the epoch's random numbers; a pickle
  std::span<const std::byte> state = {};  // where a lane goes on that starts here; a pickle
  std::span<const BlobId> blobs = {};     // the parts that it needs: the job, then its prefixes
};

enum class AnswerKind : uint8_t {
  kNone = 0,   // this is no answer
  kBatch = 1,  // the payload is that of a batch, and the last `record_bytes` of it are the batch record
  kEnd = 2,    // the shard has no more
  kError = 3,  // `body` is the text of the exception: its type's name, a zero, and the rest
};

// To a trainer.
struct PoolAnswer {
  ToTrainer message;
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  AnswerKind kind = AnswerKind::kNone;
  uint8_t flags = 0;  // kDescriptorFlags of the batch
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;   // of the whole batch, its record included; of an answer, and of its pieces
  uint64_t payload_offset = 0;  // where this message's piece belongs
  uint32_t fetch_time = 0;      // in units of kTimeUnit
  uint32_t prefix_time = 0;
  std::span<const std::byte> body = {};   // of an error, or the reason of a refusal
  std::span<const std::byte> state = {};  // the dataset's after the batch, or after the error in its place
};

// Writers must keep the caps; a reason above its cap is cut off.
std::vector<std::byte> write_to_worker(const PoolRequest& request);
std::vector<std::byte> write_to_trainer(const PoolAnswer& answer);

// The spans of the result lie in `part`. kMalformed, kTooLarge, or kMismatch for another version. `piece_bytes` is the
// size of the message's second part, 0 where it has none.
Result<PoolRequest> parse_to_worker(std::span<const std::byte> part);
Result<PoolAnswer> parse_to_trainer(std::span<const std::byte> part, uint64_t piece_bytes);

}  // namespace penstock::wire
