// SPDX-License-Identifier: Apache-2.0
#pragma once
// The requests to a pool worker, and their results.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "session/dispatch.h"
#include "shm/slab_pool.h"
#include "wire/batch_facts.h"
#include "wire/batch_key.h"
#include "wire/blob_record.h"
#include "wire/pool_record.h"

namespace penstock::server {

// A value type.
struct PoolWork {
  uint64_t trainer_id = 0;
  // Counts how often this worker started to serve a trainer without any earlier state of it. A lane that started here
  // in another tenancy has continued on another worker.
  uint64_t tenancy = 0;
  wire::BatchKey key{};
  wire::Lane lane = wire::kNoLane;
  bool is_lane_start = false;
  wire::IndexKind index_kind = wire::IndexKind::kNone;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;     // of the first sample in the order of the epoch
  double link_bytes_per_s = 0;  // measured by the trainer; 0: not yet
  std::vector<std::byte> indices{};
  std::vector<std::byte> seeds{};
  std::vector<std::byte> state{};
  std::vector<wire::BlobId> blobs{};  // the job, followed by its prefixes
  bool is_handed_over = false;        // as a slab of shared memory
  std::chrono::steady_clock::time_point begun_at{};
  std::chrono::nanoseconds cpu_begun_at{};  // by the process's CPU clock

  // The number of the batch in its epoch.
  uint64_t number() const { return wire::number_of(key); }
  // Whether the trainer already has the batch, except for the leaves that stayed with a worker.
  bool is_recall() const { return wire::is_recall(key); }
  std::span<const wire::BlobId> prefixes() const { return std::span(blobs).subspan(blobs.empty() ? 0 : 1); }
};

// A batch that is kept until the trainer has it. Its memory is released when the server lets go of it or, if it was
// handed over, when the trainer has released it as well.
class HeldBatch {
 public:
  HeldBatch(const HeldBatch&) = delete;
  HeldBatch& operator=(const HeldBatch&) = delete;
  virtual ~HeldBatch() = default;

  // The tensors' bytes, followed by the batch record.
  std::span<const std::byte> payload() const { return payload_; }
  uint32_t record_bytes() const { return record_bytes_; }

  // Null if the batch is not in a slab of this process.
  virtual const shm::SlabRegion* region() const { return nullptr; }
  // The slab was named to the trainer, which will release it.
  virtual void note_handed_over() {}
  virtual bool is_handed_over() const { return false; }

 protected:
  HeldBatch() = default;
  // Sets the location of the batch once it is known; the batch does not move.
  void hold(std::span<const std::byte> payload, uint32_t record_bytes) {
    payload_ = payload;
    record_bytes_ = record_bytes;
  }

 private:
  std::span<const std::byte> payload_;
  uint32_t record_bytes_ = 0;
};

// The outcome of a unit of work.
struct PoolResult {
  enum class Kind : uint8_t {
    kAnswer,
    kGivenUp,     // no longer wanted
    kDeclined,    // this trainer's batches cannot be made here; reason: `text`
    kHandedBack,  // this process can make no more batches; reason: `text`
    kDied,        // the process that made it has ended; how: `text`
  };
  Kind kind = Kind::kAnswer;
  wire::AnswerKind answer = wire::AnswerKind::kNone;
  uint8_t flags = 0;
  std::unique_ptr<HeldBatch> batch = {};
  std::string text = {};  // of an error: the name of its type, a zero byte, and the rest
  std::vector<std::byte> state = {};
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  wire::SampleTimes samples{};
  uint8_t cpu_share = 0;  // as in PoolAnswer
  uint32_t sample_count = 0;
  uint64_t dataset_size = wire::kSizeUntold;
};

}  // namespace penstock::server
