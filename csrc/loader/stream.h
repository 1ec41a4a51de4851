// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream of batches that a trainer reads (Stream). It defines an epoch, the number of batches requested ahead, the
// progress of the epoch, the position for a resume, requests for the next epoch before it starts, and lookahead. Every
// trainer uses it, Python's loader and C++ programs, with local workers and with a pool's.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "loader/client.h"
#include "loader/index_source.h"
#include "session/step_clock.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

// The progress of an epoch: the position from which another trainer can continue. Confined to the trainer's thread.
//
// Invariant: the shards' counts add up to the number of answers since the last share_out().
class EpochProgress {
 public:
  using State = std::vector<std::byte>;

  explicit EpochProgress(uint32_t shard_count) { share_out(shard_count); }

  uint64_t answered_count() const { return answered_count_; }  // requests whose batch or error was delivered
  uint64_t yielded_count() const { return yielded_count_; }    // delivered batches
  const std::vector<uint64_t>& shard_counts() const { return shard_counts_; }  // answers by shard
  std::optional<uint32_t> last_shard_id() const { return last_shard_id_; }     // of the last answer
  bool is_finished() const { return is_finished_; }
  uint32_t shard_count() const { return static_cast<uint32_t>(shard_counts_.size()); }

  // The last state of a shard's dataset and iterator that its worker sent; empty without one.
  const State& shard_state(uint32_t shard_id) const { return shard_states_.at(shard_id); }
  // The shard's answer count at that state; later answers had no state.
  uint64_t shard_state_count(uint32_t shard_id) const { return shard_state_counts_.at(shard_id); }
  // Sets the state after the last answer.
  void set_shard_state(uint32_t shard_id, State state) {
    shard_states_.at(shard_id) = std::move(state);
    shard_state_counts_.at(shard_id) = shard_counts_.at(shard_id);
  }

  // The shard whose turn it is, if shards are read in turn.
  uint32_t next_shard_id() const { return last_shard_id_ ? (*last_shard_id_ + 1) % shard_count() : 0; }

  // Counts the answer to the next request, a batch or an error.
  void answer(uint32_t shard_id, bool is_error) {
    ++answered_count_;
    if (!is_error) ++yielded_count_;
    ++shard_counts_.at(shard_id);
    last_shard_id_ = shard_id;
  }
  // Corrects the counts: the last answer turned out to be an error.
  void note_error() {
    PENSTOCK_ASSERT(yielded_count_ > 0);
    --yielded_count_;
  }
  // Counts an answer that will never be requested: the trainer lost the request.
  void skip_answer() { ++answered_count_; }
  void finish() { is_finished_ = true; }

  // Sets the position at which a resumed epoch continues.
  void resume(uint64_t answered_count, uint64_t yielded_count, std::optional<uint32_t> last_shard_id) {
    answered_count_ = answered_count;
    yielded_count_ = yielded_count;
    last_shard_id_ = last_shard_id;
  }
  void set_shard_answers(uint32_t shard_id, uint64_t count) { shard_counts_.at(shard_id) = count; }

  // Divides the rest of the epoch among `shard_count` shards. For a map-style dataset a shard is a worker.
  void share_out(uint32_t shard_count) {
    PENSTOCK_ASSERT(shard_count > 0);
    shard_counts_.assign(shard_count, 0);
    shard_states_.assign(shard_count, {});
    shard_state_counts_.assign(shard_count, 0);
    if (answered_count_ > 0) last_shard_id_ = static_cast<uint32_t>((answered_count_ - 1) % shard_count);
  }

 private:
  uint64_t answered_count_ = 0;
  uint64_t yielded_count_ = 0;
  std::vector<uint64_t> shard_counts_;
  std::vector<State> shard_states_;
  std::vector<uint64_t> shard_state_counts_;
  std::optional<uint32_t> last_shard_id_;
  bool is_finished_ = false;
};

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
  // Batches of the order that others have overtaken, ascending: they are requested first, and the rest of the order
  // after them. A batch's number is its place in the order.
  std::vector<uint64_t> missing = {};

  // The place in the order from which on all batches are left.
  uint64_t through() const { return progress->answered_count() + missing.size(); }
};

// Indices are supplied by an IndexSource: torch's samplers natively, a user-defined sampler through one call.
//
// The times of requests follow torch's rule: prefetch_factor batches for each worker when an epoch starts, and one for
// each batch that is delivered to the user. If any worker may make any batch, additional small batches are requested
// while the trainer waits for a slow one, so that the other workers stay busy.
//
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

  // The indices of the batch at `place`, which was requested in this epoch, in the order of torch's sampler.
  IndexSource::Indices indices_at(uint64_t place);

  // The progress of the epoch. Never null.
  const std::shared_ptr<EpochProgress>& progress() const { return plan_.progress; }

  // As Client::counters(), where batches that wait in ahead() count as ready and not delivered.
  uint32_t ready_count() const { return client_->ready_count() + static_cast<uint32_t>(ahead_.size()); }
  uint64_t dropped_ahead_count() const { return dropped_ahead_count_; }
  // Total time from the start of each epoch to its last delivered batch.
  Duration epochs_time() const { return past_epochs_ + (given_at_ - begun_at_); }

 private:
  void begin(EpochPlan plan);
  EpochStart start() const;
  void leave_epoch();
  void request_first();
  void request_replacement();
  bool request_ahead(uint64_t batch_count);
  bool ask();
  void fill();
  void stretch();
  bool may_stretch() const;
  void give(const Event& event);
  void finish();
  void report_pace();
  void begin_early();
  bool adopt_early(const TorchSamplerOptions& sampler);
  Event try_take();
  static Event failed(uint32_t worker_id, std::string what);
  std::span<const std::byte> seeds_to_send(const wire::EpochSeeds& seeds);

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
