// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of a loader as Python's loader has it (python/penstock/loader/loader_state.py): how the generators were
// before the epoch, and how many batches of it were delivered. To resume is to begin that epoch again with those
// generators in place, and to leave out the batches that were delivered.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "api/generators.h"
#include "dataset/batch_reader.h"
#include "loader/epoch_progress.h"
#include "penstock/options.h"
#include "penstock/value.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// What the stream follows from, beside the dataset's own content.
struct BuiltLoader {
  bool is_iterable = false;
  std::optional<int64_t> sample_count;  // of a map-style dataset
  uint32_t shard_count = 1;
  const Options* options = nullptr;

  // The generators that the stream is drawn from, as they are now.
  GeneratorSnapshot take_generators() const;
  // The part "built" of a state.
  Value to_value() const;
};

// The account of one epoch.
struct EpochAccount {
  int64_t epoch = 0;        // its number, from 0
  GeneratorSnapshot start;  // before the epoch drew anything
  std::optional<int64_t> base_seed = {};
  std::shared_ptr<loader::EpochProgress> progress = {};  // shared with the stream
  std::optional<sampling::RankShare> share = {};         // of the rank, where ranks share an order
  // The states of shards as they were resumed, until workers send others.
  std::map<uint32_t, Value> resumed_states = {};
};

// Where a resumed epoch goes on.
struct ResumePoint {
  int64_t base_seed = 0;
  uint64_t answered_count = 0;
  uint64_t yielded_count = 0;
  uint64_t sample_count = 0;  // of the order, that the job was given, where ranks share an order
  std::optional<uint32_t> last_shard_id = {};
  std::map<uint32_t, dataset::BatchReader::ShardStart> starts = {};  // of an iterable dataset
  std::map<uint32_t, Value> shard_states = {};
};

// A state that was read.
struct LoadedState {
  int64_t epoch = 0;
  GeneratorSnapshot generators;
  bool is_finished_in_epoch = false;      // who corrected the state knew of the epoch's end before the loader did
  std::optional<ResumePoint> point = {};  // none between epochs
};

// `epoch_count` epochs have begun. `account` is of the last one; null before the first.
Value make_state(const BuiltLoader& built, const EpochAccount* account, int64_t epoch_count);

// Throws Error kValue for what is no state, or the state of a loader whose stream is another.
LoadedState read_state(const BuiltLoader& built, const Value& state);

}  // namespace penstock::api
