// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages about batches between a trainer and its workers, without the bytes of requests and batches: the key of a
// batch, the facts about a request and a batch that are the same for all makers, the messages of a link with a pool
// worker, and the place of a batch in memory that its worker has passed. The end has the limits of a pool's messages
// and the fixed-length head with which a message starts. PROTOCOL.md is the specification.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// Identifies a batch of a job by its epoch and its number in the epoch. All requests, answers, acknowledgements and
// cancellations between a trainer and a pool use this key, regardless of who makes the batch and how often.
struct BatchKey {
  uint32_t epoch = 0;
  uint64_t sequence = 0;

  friend bool operator==(const BatchKey&, const BatchKey&) = default;
  friend bool operator<(const BatchKey& a, const BatchKey& b) {
    return std::tie(a.epoch, a.sequence) < std::tie(b.epoch, b.sequence);
  }
};

// A request for the whole of a batch that arrived without some of its leaves: a recall. It has a separate key: the
// batch's key with the highest bit of the sequence set.
constexpr uint64_t kRecallBit = uint64_t{1} << 63;
constexpr bool is_recall(const BatchKey& key) { return (key.sequence & kRecallBit) != 0; }
constexpr BatchKey recall_of(const BatchKey& key) { return {key.epoch, key.sequence | kRecallBit}; }
// The number of the batch in its epoch, for a request and for a recall.
constexpr uint64_t number_of(const BatchKey& key) { return key.sequence & ~kRecallBit; }

inline std::string to_text(const BatchKey& key) {
  if (is_recall(key)) return "the rest of " + to_text(BatchKey{key.epoch, number_of(key)});
  return "batch " + std::to_string(key.sequence) + " of epoch " + std::to_string(key.epoch);
}

// The format of a request's indices.
enum class IndexKind : uint8_t {
  kNone = 0,
  kInteger = 1,   // one int64: a single sample, batch_size=None
  kIntegers = 2,  // int64 each: a list of integers
  kPickle = 3,    // anything else, pickled by the trainer
};

// A request for a batch, without its indices. It is the same for all makers: a local worker, or a pool worker and the
// job's process in it.
struct BatchRequest {
  IndexKind index_kind = IndexKind::kNone;
  uint64_t sequence = 0;  // the number of the batch in its epoch
  uint32_t epoch = 0;
  uint32_t shard_id = 0;
  uint64_t epoch_seed = 0;   // together with the sequence, it seeds the random draws of prefixes for the batch
  uint64_t first_place = 0;  // the place of its first sample in the order of the epoch, from 0
};

// Flags of a batch.
constexpr uint8_t kBatchRaises = 1;       // it is an ExceptionWrapper; raise its exception instead
constexpr uint8_t kBatchThreadsDrew = 4;  // samples drew random numbers that cannot be reproduced
constexpr uint8_t kBatchHasState = 8;     // the nest is a pair of the batch and its dataset's state
constexpr uint8_t kBatchCompiled = 16;    // compiled code produced some of its boundary tensors
// As far as is detectable, the batches that the worker made so far have left its dataset unchanged. Another worker may
// make the same batch again without observable effects.
constexpr uint8_t kBatchDatasetStays = 32;
constexpr uint8_t kBatchFlags = kBatchRaises | kBatchThreadsDrew | kBatchHasState | kBatchCompiled | kBatchDatasetStays;
// From a job's process to its server only, for work with a name (session/named_batches.h): the batch is a function of
// its name, and no random number was drawn for it.
constexpr uint8_t kBatchMayBeKept = 64;
constexpr uint8_t kBatchDrawsNothing = 128;
constexpr uint8_t kBatchKeepingFlags = kBatchMayBeKept | kBatchDrawsNothing;

// The unit of times. Times saturate at 32 bits, or 429 s.
constexpr std::chrono::nanoseconds kTimeUnit{100};
uint32_t time_units(std::chrono::nanoseconds time);

// The unit of a share of a time.
constexpr uint32_t kShareUnit = 65535;
uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole);

// The time spent on the samples of a batch, before they were collated.
struct SampleTimes {
  uint32_t dataset_time = 0;   // for all samples, in units of kTimeUnit
  uint16_t slowest_place = 0;  // position in the batch of the sample that took longest
  uint16_t slowest_share = 0;  // that sample's part of dataset_time, in units of 1 / kShareUnit; 0: unknown
};

// A trainer's facts about a batch, apart from its content; the same for all makers. A value type.
struct BatchFacts {
  uint8_t flags = 0;
  bool is_transient = false;  // its arena was made only for it and is not reused
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t worker_id = 0;
  uint32_t record_bytes = 0;   // of the batch record
  uint64_t record_offset = 0;  // its start in the slab
  uint64_t slab_bytes = 0;     // bytes of the slab that are backed by memory
  uint32_t fetch_time = 0;     // from the request's arrival at the worker to its answer, in units of kTimeUnit
  uint32_t prefix_time = 0;    // the part for boundary tensors: computing them and writing the batch that contains them
  SampleTimes samples{};       // within fetch_time
};

// A shard of an iterable dataset, counted from 1; kNoLane for a batch that depends only on its indices.
using Lane = uint32_t;
constexpr Lane kNoLane = 0;

// A message of a trainer to a pool worker. The bytes of a request follow it.
struct ToWorker {
  enum class Kind : uint8_t {
    kHello = 1,  // starts a link; if it continues one, `count` requests that were outstanding on it follow immediately
    kRequest,
    kCancel,
    kAck,  // the trainer has the batch in its memory, or does not want it
    kPing,
    kBye,  // the trainer has ended or, if `is_continued`, no longer needs this worker but may return
  };
  Kind kind = Kind::kPing;
  uint64_t trainer_id = 0;  // of this run of the trainer
  uint32_t link = 0;
  uint64_t stamp = 0;
  BatchKey key{};
  Lane lane = kNoLane;
  bool is_lane_start = false;
  bool is_continued = false;
  uint32_t count = 0;

  friend bool operator==(const ToWorker&, const ToWorker&) = default;
};

// A message of a pool worker to a trainer. The bytes of a batch follow it.
struct ToTrainer {
  enum class Kind : uint8_t {
    kWelcome = 1,  // the link has started
    kRefused,      // the worker serves another trainer, or is leaving
    kBroken,       // a message on the link was lost, or the link is unknown to the worker: start another
    kStarted,
    kAnswer,
    kHandedBack,  // the worker is leaving and will not make this batch
    kPong,
    kLeaving,   // the worker accepts no more requests
    kDeclined,  // the worker cannot make this trainer's batches
    kDied,      // the worker continues, but the process that was making this batch has ended: start another link
  };
  Kind kind = Kind::kPong;
  uint32_t link = 0;
  uint64_t stamp = 0;  // 0 for refused, broken and declined, which belong to no link
  BatchKey key{};
  bool is_fresh = false;  // of welcome: the worker has no state of the previous link

  friend bool operator==(const ToTrainer&, const ToTrainer&) = default;
};

// The location of a batch's bytes in memory that its worker has passed to the trainer. The two messages after it are
// the messages on the channel over which a pool worker passes such memory (server/answer_outbox.h).
struct SlabPlace {
  uint32_t arena_id = 0;
  uint32_t slab_index = 0;
  uint32_t generation = 0;
  bool is_transient = false;  // the arena is used once
  uint64_t slab_bytes = 0;    // of the slab, backed by memory

  friend bool operator==(const SlabPlace&, const SlabPlace&) = default;
};

// The trainer's first and only message: the link on which it is about to greet the worker.
struct HandoverHello {
  uint64_t trainer_id = 0;
  uint32_t link = 0;
  uint32_t reserved = 0;

  friend bool operator==(const HandoverHello&, const HandoverHello&) = default;
};
static_assert(sizeof(HandoverHello) == 16);

// The worker's message about an arena, whose file descriptor is attached.
struct HandoverArena {
  uint32_t arena_id = 0;
};
static_assert(sizeof(HandoverArena) == 4);

// Caps on a pool's messages: on their parts and on the whole.
constexpr size_t kPartCountMax = 8;
constexpr uint64_t kPartBytesMax = uint64_t{8} << 20;
constexpr uint64_t kMessageBytesMax = kPartBytesMax + (uint64_t{64} << 10);
// The frames of a handshake must fit as well.
constexpr uint64_t kPartBytesLimitMin = 1024;

// The limits of messages on a connection. Both sides have the same limits, since libzmq silently drops a message above
// the receiver's limit, and the connection with it.
struct MessageLimits {
  uint64_t part_bytes_max = kPartBytesMax;
  uint64_t message_bytes_max = kMessageBytesMax;  // all parts together
  // Limits of messages waiting to be read from one peer, and to be sent to it. They bound the memory that a misbehaving
  // peer can make this process hold; well-behaved peers are bounded by credits, in bytes.
  int received_messages_max = 64;
  int sent_messages_max = 1024;
};

// The fixed-length head at the start of a message: a struct whose first fields are `magic`, `version` and `kind`.
struct HeadRules {
  uint32_t magic = 0;
  uint16_t version = 0;
  uint8_t kind_max = 0;
  std::string_view subject{};  // names the message, as for malformed()
  std::string_view hint = "run the same version of penstock on both sides";
};

// The head of `part`, with its magic, version, length and kind checked against `rules`. kMismatch for another version.
template <typename Head>
Result<Head> read_head(std::span<const std::byte> part, const HeadRules& rules) {
  Head head;
  // The head of another version may be shorter, so the version is checked first.
  if (!part.empty()) std::memcpy(&head, part.data(), std::min(part.size(), sizeof head));
  const bool is_ours = head.magic == rules.magic;
  if (is_ours && head.version != rules.version) {
    return Fault{Errc::kMismatch, std::string(rules.subject) + " has version " + std::to_string(head.version) +
                                      ", but this process uses version " + std::to_string(rules.version) + "; " +
                                      std::string(rules.hint)};
  }
  if (part.size() < sizeof head) return malformed(rules.subject, std::to_string(part.size()) + " bytes long");
  if (!is_ours) return malformed(rules.subject, "its magic number is wrong");
  if (head.kind == 0 || head.kind > rules.kind_max)
    return malformed(rules.subject, "unknown kind " + std::to_string(head.kind));
  return head;
}

// The head followed by its bodies.
template <typename Head>
std::vector<std::byte> message_of(const Head& head, std::initializer_list<std::span<const std::byte>> bodies) {
  size_t size = sizeof head;
  for (const auto body : bodies) size += body.size();
  std::vector<std::byte> part(size);
  std::memcpy(part.data(), &head, sizeof head);
  size_t end = sizeof head;
  for (const auto body : bodies) {
    if (!body.empty()) std::memcpy(part.data() + end, body.data(), body.size());
    end += body.size();
  }
  return part;
}

}  // namespace penstock::wire
