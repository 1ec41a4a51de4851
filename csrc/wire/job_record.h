// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages to and from a process that makes batches for another process of its machine: a local worker, for its
// trainer, or the process of a job, for the server of a pool worker. Also the messages between that server and its warm
// process, which forks one process for each job. Each is one message of a channel (shm/channel.h). PROTOCOL.md is the
// specification.
//
// A process that makes batches runs user code and may send arbitrary bytes. They are checked here when they are read,
// and can affect only its own batches.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numerics.h"
#include "base/result.h"
#include "wire/blob_record.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::wire {

constexpr uint32_t kToJobMagic = 0x314a4e50;    // "PNJ1"
constexpr uint32_t kFromJobMagic = 0x314f4e50;  // "PNO1"
constexpr uint32_t kWarmMagic = 0x31484e50;     // "PNH1"
constexpr uint16_t kJobVersion = 2;
constexpr size_t kToJobHeadBytes = 104;
constexpr size_t kFromJobHeadBytes = 96;
constexpr size_t kWarmHeadBytes = 40;

// The most that a job's process may put after a head, apart from the bytes of a batch for which there is no slab.
constexpr uint64_t kJobBodyBytesMax = kPoolBodyBytesMax;
// The largest batch that is sent without a slab; the server copies it into its own memory.
constexpr uint64_t kJobBatchBytesMax = uint64_t{1} << 30;
constexpr uint64_t kFromJobMessageBytesMax = kFromJobHeadBytes + kJobBodyBytesMax + kJobBatchBytesMax;
// The most that a local worker may put there; the sizes of its states depend on its dataset.
constexpr uint64_t kLocalBodyBytesMax = kPoolPayloadBytesMax;
constexpr size_t kAboutBytesMax = 4096;   // of a warm process
constexpr size_t kLogNameBytesMax = 256;  // of a job's process

// ---- To a process that makes batches

struct ToJob {
  enum class Kind : uint8_t {
    kWork = 1,  // make this batch; all fields below count
    // To the process of a job.
    kUnwanted,    // the batch being made is no longer wanted
    kWanted,      // it is wanted again
    kBlob,        // `body` is the first of `blobs`, the requested blob
    kBlobInFile,  // the attached descriptor contains it
    kNoBlob,      // it is unavailable: `error`, with the text of `body`
    // To a local worker.
    kEpoch,           // an epoch starts: recreate the fetcher, with the epoch's `seeds`
    kEarlyEpoch,      // work of the next epoch follows although that epoch may never start
    kPrefix,          // run this prefix on every later batch; `body` is an encoded batch record and payload
    kRemovePrefixes,  // forget all prefixes
    kStates,          // send the dataset's state with batches from now on; `indices`: the interval, and a question or 0
  };
  Kind kind = Kind::kWork;
  uint8_t error = 0;  // an Errc
  bool is_lane_start = false;
  bool is_named = false;  // of a job's work: the server may keep the batch for requests of the same name
  IndexKind index_kind = IndexKind::kNone;
  uint64_t trainer_id = 0;
  uint64_t tenancy = 0;
  BatchKey key{};
  Lane lane = kNoLane;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;
  double link_bytes_per_s = 0;
  uint64_t blob_bytes = 0;  // of kBlobInFile
  std::span<const std::byte> indices = {};
  std::span<const std::byte> seeds = {};
  std::span<const std::byte> state = {};
  std::span<const BlobId> blobs = {};
  std::span<const std::byte> body = {};  // of kBlob and kNoBlob
};

std::vector<std::byte> write_to_job(const ToJob& message);
// Only the head, if the spans are sent from their location: blobs, indices, seeds, state, body.
std::array<std::byte, kToJobHeadBytes> to_job_head(const ToJob& message);
// The spans of the result point into `part`. kMalformed, or kMismatch for another version.
Result<ToJob> parse_to_job(std::span<const std::byte> part);

// ---- From a process that makes batches

struct FromJob {
  enum class Kind : uint8_t {
    kResult = 1,   // the outcome of the work, by `answer`; a batch lies in the slab of `place`, or in `payload`
    kGivenUp,      // no longer wanted
    kDeclined,     // this trainer's batches cannot be made here; reason: `text`
    kBlobRequest,  // `blob` is needed
    // From a local worker.
    kReady,   // its first message: it accepts work
    kStates,  // `state` has the requested states of its shards
  };
  Kind kind = Kind::kResult;
  AnswerKind answer = AnswerKind::kNone;
  BatchKey key{};     // of the work; unused by kReady
  uint8_t flags = 0;  // kBatchFlags; of a job kPoolAnswerFlags and kBatchKeepingFlags
  uint8_t cpu_share = 0;
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;  // of a batch, its record included
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  SampleTimes samples{};
  uint32_t sample_count = 0;
  uint64_t dataset_size = kSizeUnknown;
  // The location of the batch, from the start of the slab.
  std::optional<SlabPlace> place = {};
  bool is_new_arena = false;  // its descriptor is attached, before the descriptors of files
  BlobId blob{};              // of kBlobRequest
  std::span<const std::byte> text = {};
  std::span<const std::byte> state = {};
  std::span<const std::byte> payload = {};  // of a batch without a slab
};

// The head and all that follows it except the payload, which follows in the same message.
std::vector<std::byte> write_from_job(const FromJob& message);
// Only the head, if the spans are sent from their location: text, state, payload.
std::array<std::byte, kFromJobHeadBytes> from_job_head(const FromJob& message);
// The spans of the result point into `part`. `body_bytes_max` is the cap of text and state together. kMalformed,
// kTooLarge, or kMismatch for another version.
Result<FromJob> parse_from_job(std::span<const std::byte> part, uint64_t body_bytes_max = kJobBodyBytesMax);

// ---- Between a server and its warm process

struct WarmMessage {
  enum class Kind : uint8_t {
    kReady = 1,  // from the process: it can fork; `numerics`, `torch`, `job_kinds`, and `text` about it for people
    kFork,       // to it: fork a process for `job` that logs as `text`; its channel and the descriptor for its
                 // standard error are attached
    kStarted,    // from it: `pid` is the process of `job`
    kEnded,      // from it: that process has ended, `status` as from waitpid(), or could not be forked: pid 0
    kEnd,        // to it: end the process of `job` immediately, with its whole session
  };
  Kind kind = Kind::kReady;
  uint16_t torch = 0;
  uint8_t job_kinds = 0;  // of kReady: the kinds that its processes can run, as in a worker's report
  uint64_t job = 0;
  int32_t pid = 0;
  int32_t status = 0;
  Numerics numerics{};
  std::string_view text = {};
};

std::vector<std::byte> write_warm_message(const WarmMessage& message);
// The text of the result points into `part`. kMalformed, or kMismatch for another version.
Result<WarmMessage> parse_warm_message(std::span<const std::byte> part);

}  // namespace penstock::wire
