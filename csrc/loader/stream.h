// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream of batches that a trainer reads. It defines an epoch, how many batches are asked for ahead, how far the
// epoch has come, the place for a resume, batches of the next epoch before it begins, and looking ahead. Every trainer
// goes through it, Python's loader and a C++ program, with local workers and with a pool's. Indices come from an
// IndexSource: torch's own samplers natively, a sampler of the user's through one call.
//
// Which batches are asked for when is torch's own rule: prefetch_factor for each worker when an epoch begins, and one
// in the place of each batch that the user is given. Where any worker may make any batch, small batches are asked for
// beyond that while the trainer waits for a slow one, so that the other workers do not wait too.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "cluster/step_clock.h"
#include "loader/client.h"
#include "loader/epoch_progress.h"
#include "loader/expected_epoch.h"
#include "loader/index_source.h"
#include "loader/torch_sampler.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

struct StreamOptions {
  bool is_iterable = false;         // shards end at moments of their own
  bool asks_while_room = false;     // as many as there is room for, and not one in the place of each
  bool may_begin_early = false;     // the next epoch may be asked for before it begins
  bool is_seeded_by_batch = false;  // workers are told the seeds of each epoch
};

// The beginning of an epoch.
struct EpochPlan {
  wire::EpochSeeds seeds{};
  std::optional<at::Generator> base_generator{};  // that the next epoch's base seed is drawn from, seeded by batch
  // Where the epoch begins; kept up to date as batches are given out. Without one, the stream has its own.
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

  // Forgets the epoch before and asks for the first batches of the next one: those of torch's own sampler (its options
  // are those of the whole epoch, also where `plan.progress` begins later), or those that `indices` gives.
  void begin_epoch(EpochPlan plan, const TorchSamplerOptions& sampler);
  void begin_epoch(EpochPlan plan, std::unique_ptr<IndexSource> indices);

  // The next event if it is here, and asks for a batch in the place of one that it gives out. Never blocks. kMoreRoom
  // does not leave the stream. Throws the index source's exceptions; the batch is lost then, as in torch's loader.
  Event try_next();
  // The next event as try_next() gives it. Waits until `deadline` if nothing is here, and gives kNothing then. Blocks.
  Event next(std::chrono::steady_clock::time_point deadline);

  // Makes the next event wait here in its place, without asking for a batch in its stead, until `batch_count` wait.
  // kBatch if the last of ahead() is new. Any other event is for the caller to handle, and does not come again. Never
  // blocks.
  Event try_look_ahead(uint32_t batch_count);
  // The batches that wait here, the next one first. Those of an epoch that was left are dropped.
  const std::deque<Event>& ahead() const { return ahead_; }
  // The newest batch that waits here. It may turn out to be unreadable.
  Event& last_ahead() { return ahead_.back(); }

  // Ends the epoch here, whatever is left of it: those that wait, and all that comes.
  void drop_rest();

  // How far the epoch has come. Never null.
  const std::shared_ptr<EpochProgress>& progress() const { return plan_.progress; }

  // As Client::counters(), where batches that wait in ahead() are ready and not delivered.
  uint32_t ready_count() const { return client_->ready_count() + static_cast<uint32_t>(ahead_.size()); }
  uint64_t dropped_ahead_count() const { return dropped_ahead_count_; }
  // From the beginning of each epoch to the last batch that the user was given of it, added up.
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
  TorchSampler* sampler_ = nullptr;  // indices_, where it is torch's own
  TorchSamplerOptions recipe_;       // the calls and settings that it was made with
  at::Tensor index_buffer_;          // of the last epoch's sampler
  std::vector<std::byte> seed_bytes_;
  // Batches of the epoch, and of the one that was begun early, whose indices were drawn; and those that the user was
  // given. They are the same number where an epoch of a map-style dataset ends.
  uint64_t drawn_count_ = 0;
  uint64_t early_drawn_count_ = 0;
  uint64_t given_count_ = 0;
  std::deque<Event> ahead_;
  std::map<uint32_t, std::vector<std::byte>> end_states_;  // of shards that have ended, by shard
  uint64_t dropped_ahead_count_ = 0;
  std::optional<ExpectedEpoch> expected_;
  std::unique_ptr<TorchSampler> early_sampler_;
  cluster::StepClock step_clock_;
  Duration past_epochs_{0};
  Instant begun_at_{};
  Instant given_at_{};   // the last time; when the epoch began before its first batch
  bool was_met_ = true;  // the last expectation; the first is taken to be
};

}  // namespace penstock::loader
