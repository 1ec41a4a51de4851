// SPDX-License-Identifier: Apache-2.0
#pragma once
// The progress of an epoch: the position from which another trainer can continue.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/assert.h"

namespace penstock::loader {

// Confined to the trainer's thread.
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

}  // namespace penstock::loader
