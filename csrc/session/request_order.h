// SPDX-License-Identifier: Apache-2.0
#pragma once
// RequestOrder, the order of a stream: which shard makes which batch, and which batch the trainer may have next.
// RequestContent is the content of a request, kept while the request is outstanding.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "wire/blob_record.h"
#include "wire/message.h"

namespace penstock::session {

// The content of a request: all data that a worker needs to make one batch. It is created once, when the trainer sends
// the request, and kept in one place while the request is outstanding: the trainer's thread reads it to name the batch
// that it is waiting for, and the I/O thread sends it again when a worker is lost.
struct RequestContent {
  wire::BatchRequest request;
  std::vector<std::byte> indices;  // as specified by request.index_kind
  // The job and the prefixes with which a pool makes the batch. All requests between two changes of these share one
  // list.
  std::shared_ptr<const std::vector<wire::BlobId>> blobs{};
  // The seeds of the epoch's random numbers, which a pool receives with each request; shared in the same way.
  std::shared_ptr<const std::vector<std::byte>> seeds{};
};

using SharedContent = std::shared_ptr<const RequestContent>;

// The number of batches that may overtake the oldest one where the order is free.
inline constexpr uint32_t kAnyOrder = UINT32_MAX;

struct RequestOrderOptions {
  uint32_t shard_count = 1;
  uint32_t outstanding_count_max = 2;
  uint32_t overtaking_max = 0;  // batches that may be delivered before the oldest undelivered one
  // Start of a resumed epoch: all requests from `first_sequence` on are left, and the ones in `missing`, ascending
  // numbers below it. They are assigned first.
  uint64_t first_sequence = 0;
  std::vector<uint64_t> missing = {};
  uint32_t first_shard_id = 0;  // and the shard whose turn it is
  // Requests to an ended shard no longer count as outstanding. Torch continues to count them.
  bool frees_ended_shards = false;
};

// Exactly torch's order, in which every worker is one shard. Batch k is assigned to the next shard in turn that still
// has data; batches are delivered by sequence, or as they arrive while at most overtaking_max of them have overtaken
// the oldest one that was not delivered. The assignment of workers to shards is decided elsewhere. A pure state
// machine: it reads no clock and owns no socket. Thread-compatible.
//
// Invariant: outstanding_count() == tasks that were assigned and neither arrived nor were given up.
class RequestOrder {
 public:
  explicit RequestOrder(const RequestOrderOptions& options);

  struct Assignment {
    uint64_t sequence;
    uint32_t shard_id;
  };
  // The shard of the next request; nullopt when no shard has data left (the request is then dropped, as in torch).
  std::optional<Assignment> assign();

  enum class Next : uint8_t {
    kReady,  // ready_sequence() has arrived and is next
    kWait,   // an answer is needed first
    kEnd,    // there are no more batches
  };
  // The trainer's next step. Skips requests that their shard will never answer.
  Next next();
  uint64_t ready_sequence() const { return ready_sequence_; }

  // Whether no other batch than the oldest undelivered one may be delivered now.
  bool waits_for_oldest() const { return overtaking_count() >= options_.overtaking_max; }

  // Keeps the content of the last assigned request, for awaited(). It is kept until the batch is delivered.
  void keep(uint64_t sequence, SharedContent content);

  // The oldest request that an active shard has yet to answer, and its content, if that was kept.
  struct Awaited {
    uint64_t sequence;
    uint32_t shard_id;
    SharedContent content;
  };
  std::optional<Awaited> awaited() const;

  // Whether the request was assigned and has not been answered.
  bool is_outstanding(uint64_t sequence) const;

  // An answer arrived. Returns true if it is the trainer's next batch (in the configured order), so that it need not be
  // stored.
  bool arrived(uint64_t sequence);

  // The batch was delivered to the trainer. Returns its shard, which has room again.
  uint32_t delivered(uint64_t sequence);

  // A shard of an iterable dataset is exhausted; `sequence` is the request whose answer reported it. Returns the shard.
  uint32_t shard_ended(uint64_t sequence);

  // Requests whose batch has yet to be delivered, without the requests that an ended shard leaves unanswered.
  uint32_t undelivered_count() const;

  uint64_t send_count() const { return send_index_; }  // assigned so far, including the ones before a resumed epoch
  bool is_active(uint32_t shard_id) const { return is_active_[shard_id]; }
  uint32_t outstanding_count() const { return outstanding_count_; }
  void set_outstanding_count_max(uint32_t count) { options_.outstanding_count_max = count; }
  uint32_t outstanding_count_max() const { return options_.outstanding_count_max; }

 private:
  struct Task {
    uint32_t shard_id;
    bool has_arrived;
    SharedContent content{};
  };

  // Requests have consecutive indices. The request with the last of the missing numbers has the index
  // first_sequence - 1, and later requests have their numbers as indices.
  uint64_t first_index() const { return options_.first_sequence - options_.missing.size(); }
  uint64_t sequence_of(uint64_t index) const {
    return index >= options_.first_sequence ? index : options_.missing[index - first_index()];
  }
  // kNoIndex for a number that is not left.
  uint64_t index_of(uint64_t sequence) const;
  // The number of delivered batches that are later than the oldest undelivered one.
  uint64_t overtaking_count() const { return send_index_ - received_index_ - tasks_.size(); }
  // Moves received_index_ to the oldest undelivered request.
  void skip_delivered();
  // The index of a batch that has arrived and may overtake the oldest one.
  std::optional<uint64_t> overtaking_batch() const;

  static constexpr uint64_t kNoIndex = UINT64_MAX;

  RequestOrderOptions options_;
  uint64_t send_index_;
  uint64_t received_index_;  // of the oldest undelivered request, or a delivered one before it
  uint64_t ready_sequence_ = 0;
  uint32_t stored_count_ = 0;       // batches that have arrived and were not delivered
  std::map<uint64_t, Task> tasks_;  // by index
  std::vector<bool> is_active_;
  std::vector<uint32_t> task_counts_;
  uint32_t active_count_;
  uint32_t next_shard_;
  uint32_t outstanding_count_ = 0;
};

}  // namespace penstock::session
