// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between the servers of one machine about the batches that they keep for requests of the same name
// (server/machine_store.h): one of the servers keeps the batches of all, and the others ask it. Each is one message of
// a channel (shm/channel.h). PROTOCOL.md is the specification.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::wire {

constexpr uint32_t kToStoreMagic = 0x314b4e50;    // "PNK1"
constexpr uint32_t kFromStoreMagic = 0x314c4e50;  // "PNL1"
constexpr uint16_t kStoreVersion = 2;
constexpr size_t kToStoreHeadBytes = 128;
constexpr size_t kFromStoreHeadBytes = 112;
// A batch of at most this size follows its message; the memory of a larger one is passed as a descriptor.
constexpr uint64_t kStoreInlineBytesMax = 32 << 10;
// The parts of a name together. A message that has the largest name and batch fits into the buffer of a socket, so that
// sending it does not block.
constexpr uint64_t kStoreNameBytesMax = 128 << 10;
constexpr uint64_t kStoreMessageBytesMax = kToStoreHeadBytes + kStoreNameBytesMax + kStoreInlineBytesMax;

using StoreNonce = std::array<std::byte, 16>;
using StoreProof = std::array<std::byte, 32>;

// The name of a batch, as session::BatchName.
struct StoreName {
  std::span<const std::byte> group{};
  std::span<const std::byte> samples{};
  std::span<const std::byte> epoch{};
  std::span<const std::byte> place{};

  uint64_t bytes() const { return group.size() + samples.size() + epoch.size() + place.size(); }
};

// A kept batch: the facts with which it is answered, and its bytes unless their memory is attached.
struct StoreBatch {
  uint8_t flags = 0;      // kPoolAnswerFlags
  uint8_t cpu_share = 0;  // as in PoolAnswer
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  SampleTimes samples{};
  uint32_t sample_count = 0;
  uint64_t dataset_size = kSizeUnknown;
  uint32_t record_bytes = 0;
  uint64_t payload_bytes = 0;
  std::span<const std::byte> payload{};  // empty: larger than kStoreInlineBytesMax, in the attached file
};

// To the server that keeps the batches. Each message has exactly one answer, and no message is sent before the answer
// of the one before it.
struct ToStore {
  enum class Kind : uint8_t {
    kHello = 1,    // `nonce` and `proof`; with `is_for_wakes`, the connection is for the answers kWake only
    kJoin,         // the worker's share of the bytes is `number`
    kLeave,        // the worker has left
    kAsk,          // for the batch of the name
    kStopWaiting,  // the worker waits for no batch
    kAdmit,        // a batch of `number` bytes was made
    kSettle,       // `batch` is the one admitted under `number`
    kDrop,         // the one admitted under `number` will not be kept
    kRelease,      // the batch of the name will not be made
    kRefuse,       // it was made and may not be kept
    kCount,        // of the bytes of batches that the worker has made
  };
  // Of a comparison with the batch that kCompare named, as session::NamedBatches::Comparison.
  enum class Comparison : uint8_t { kNone = 0, kEqual, kDifferent, kUnclear };

  Kind kind = Kind::kHello;
  Comparison comparison = Comparison::kNone;
  bool is_for_wakes = false;
  bool may_wait = false;
  bool is_ahead = false;  // of kAsk: whether the batch may be requested ahead; no batch is sent
  bool draws_nothing = false;
  bool is_cheap = false;  // of kAdmit: to be kept only if batches of its job are requested again
  uint64_t worker_id = 0;
  uint64_t trainer_id = 0;
  uint64_t number = 0;
  StoreNonce nonce{};
  StoreProof proof{};
  StoreName name{};
  std::optional<StoreBatch> batch{};
};

struct FromStore {
  enum class Kind : uint8_t {
    kChallenge = 1,  // `nonce`: the first message of a connection
    kAccepted,       // `proof`, in answer to a hello
    kDone,           // `number` is the answer to kCount
    kKept,           // `batch` has the name
    kMake,
    kWait,
    kAdmitted,  // under `number`; 0: it is not kept
    kCompare,   // it has to be compared with `batch` first
    kWake,      // workers that wait may look again; without a question
  };

  Kind kind = Kind::kDone;
  bool is_sparse = false;  // of kKept, kMake and kWait, as in session::NamedBatches::Found
  uint64_t number = 0;
  StoreNonce nonce{};
  StoreProof proof{};
  std::optional<StoreBatch> batch{};
};

// The parts of the names must not exceed kStoreNameBytesMax together.
std::vector<std::byte> write_to_store(const ToStore& message);
std::vector<std::byte> write_from_store(const FromStore& message);
// kMalformed, or kMismatch for another version. The spans view the part.
Result<ToStore> parse_to_store(std::span<const std::byte> part);
Result<FromStore> parse_from_store(std::span<const std::byte> part);

}  // namespace penstock::wire
