// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream of batches that a trainer reads. It defines an epoch, the number of batches requested ahead, the progress
// of the epoch, the position for a resume, requests for the next epoch before it starts, and lookahead. Every trainer
// uses it, Python's loader and C++ programs, with local workers and with a pool's. Indices are supplied by an
// IndexSource: torch's samplers natively, a user-defined sampler through one call.
//
// The times of requests follow torch's rule: prefetch_factor batches for each worker when an epoch starts, and one for
// each batch that is delivered to the user. If any worker may make any batch, additional small batches are requested
// while the trainer waits for a slow one, so that the other workers stay busy.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "loader/client.h"
#include "loader/epoch_progress.h"
#include "loader/expected_epoch.h"
#include "loader/index_source.h"
#include "loader/torch_sampler.h"
#include "session/step_clock.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

struct StreamOptions {
  bool is_iterable = false;         // shards end at different times
  bool asks_while_room = false;     // request as many as there is room for, instead of one per delivered batch
  bool may_begin_early = false;     // the next epoch may be requested before it starts
  bool is_seeded_by_batch = false;  // workers receive the seeds of each epoch
};

// The start of an epoch.
struct EpochPlan {
  wire::EpochSeeds seeds{};
  std::optional<at::Generator> base_generator{};  // the source of the next epoch's base seed, if seeded by batch
  // The position at which the epoch starts; updated as batches are delivered. Null: the stream makes one.
  std::shared_ptr<EpochProgress> progress = {};
};

// Thread-compatible: for one trainer thread.
class Stream {
 public:
  using Event = Client::Event;

  // `client` is shared with the owner that keeps it for the next stream.
  Stream(std::shared_ptr<Client> client, const StreamOptions& options);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Client& client() { return *client_; }

  // Forgets the previous epoch and requests the first batches of the next one, in the order of torch's sampler (its
  // options are for the whole epoch, even if `plan.progress` starts later) or of `indices`.
  void begin_epoch(EpochPlan plan, const TorchSamplerOptions& sampler);
  void begin_epoch(EpochPlan plan, std::unique_ptr<IndexSource> indices);

  // Returns the next event if there is one; for each delivered batch, requests another. Never blocks. kMoreRoom is
  // handled inside the stream. Throws the index source's exceptions; the batch is lost then, as in torch's loader.
  Event try_next();
  // Returns the next event as try_next() does. Waits until `deadline` if there is none, and then returns kNothing.
  // Blocks.
  Event next(std::chrono::steady_clock::time_point deadline);

  // Moves the next event into ahead(), where it keeps its turn, without requesting another batch for it, until
  // `batch_count` events wait. Returns kBatch if the last of ahead() is new. Any other event must be handled by the
  // caller and is not repeated. Never blocks.
  Event try_look_ahead(uint32_t batch_count);
  // The batches that wait here, the next one first. They are dropped when their epoch is left.
  const std::deque<Event>& ahead() const { return ahead_; }
  // The newest batch that waits here. It may turn out to be unreadable.
  Event& last_ahead() { return ahead_.back(); }

  // Ends the epoch here and drops the rest of it: the waiting batches and all later arrivals.
  void drop_rest();

  // The progress of the epoch. Never null.
  const std::shared_ptr<EpochProgress>& progress() const { return plan_.progress; }

  // As Client::counters(), where batches that wait in ahead() count as ready and not delivered.
  uint32_t ready_count() const { return client_->ready_count() + static_cast<uint32_t>(ahead_.size()); }
  uint64_t dropped_ahead_count() const { return dropped_ahead_count_; }
  // Total time from the start of each epoch to its last delivered batch.
  Duration epochs_time() const { return past_epochs_ + (given_at_ - begun_at_); }

 private:
  void begin(EpochPlan plan);
  void leave_epoch();
  void ask_for_first();
  void ask_in_place();
  bool ask_ahead(uint64_t batch_count);
  bool ask();
  void fill();
  void stretch();
  bool may_stretch() const;
  void give(const Event& event);
  void finish();
  void tell_pace();
  void begin_early();
  bool adopt_early(const TorchSamplerOptions& sampler);
  Event try_take();
  static Event failed(uint32_t worker_id, std::string what);
  std::span<const std::byte> seeds_to_tell(const wire::EpochSeeds& seeds);

  std::shared_ptr<Client> client_;
  StreamOptions options_;
  EpochPlan plan_;
  std::unique_ptr<IndexSource> indices_;
  TorchSampler* sampler_ = nullptr;  // indices_, if it is torch's sampler
  TorchSamplerOptions recipe_;       // the settings that it was made with
  at::Tensor index_buffer_;          // of the last epoch's sampler
  std::vector<std::byte> seed_bytes_;
  // The number of batches whose indices were drawn, for the epoch and for the early one; and of batches that were
  // delivered. The first and the last are equal at the end of an epoch of a map-style dataset.
  uint64_t drawn_count_ = 0;
  uint64_t early_drawn_count_ = 0;
  uint64_t given_count_ = 0;
  std::deque<Event> ahead_;
  std::map<uint32_t, std::vector<std::byte>> end_states_;  // of ended shards, by shard
  uint64_t dropped_ahead_count_ = 0;
  std::optional<ExpectedEpoch> expected_;
  std::unique_ptr<TorchSampler> early_sampler_;
  session::StepClock step_clock_;
  Duration past_epochs_{0};
  Instant begun_at_{};
  Instant given_at_{};   // the time of the last delivery; before the first batch, the epoch's start
  bool was_met_ = true;  // the last prediction was right; initially assumed
};

}  // namespace penstock::loader
