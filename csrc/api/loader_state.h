// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of a loader, in the format of Python's loader (python/penstock/loader/loader_state.py): the generator
// states before the epoch, and the number of its batches that were delivered. Resuming restores these generators,
// starts the epoch again and skips the batches that were delivered.

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

// The properties that determine the stream, apart from the dataset's content.
struct BuiltLoader {
  bool is_iterable = false;
  std::optional<int64_t> sample_count;  // for a map-style dataset
  uint32_t shard_count = 1;
  const Options* options = nullptr;

  // The current states of the generators that the stream is drawn from.
  GeneratorSnapshot take_generators() const;
  // The part "built" of a state.
  Value to_value() const;
};

// The record of one epoch.
struct EpochAccount {
  int64_t epoch = 0;        // its index, from 0
  GeneratorSnapshot start;  // before the epoch's first draw
  std::optional<int64_t> base_seed = {};
  std::shared_ptr<loader::EpochProgress> progress = {};  // shared with the stream
  std::optional<sampling::RankShare> share = {};         // the rank's share, if ranks share an order
  // The shard states that the epoch was resumed from, until workers send newer ones.
  std::map<uint32_t, Value> resumed_states = {};
};

// The position at which a resumed epoch continues.
struct ResumePoint {
  int64_t base_seed = 0;
  uint64_t answered_count = 0;
  uint64_t yielded_count = 0;
  uint64_t sample_count = 0;  // samples of the order delivered to the job, if ranks share an order
  std::optional<uint32_t> last_shard_id = {};
  std::map<uint32_t, dataset::BatchReader::ShardStart> starts = {};  // for an iterable dataset
  std::map<uint32_t, Value> shard_states = {};
};

// A parsed state.
struct LoadedState {
  int64_t epoch = 0;
  GeneratorSnapshot generators;
  bool is_finished_in_epoch = false;      // set by a program that adjusted the state past the epoch's end
  std::optional<ResumePoint> point = {};  // none between epochs
};

// `epoch_count` epochs have started. `account` describes the last one; null before the first.
Value make_state(const BuiltLoader& built, const EpochAccount* account, int64_t epoch_count);

// Throws Error kValue for an invalid state and for the state of a loader with a different stream.
LoadedState read_state(const BuiltLoader& built, const Value& state);

}  // namespace penstock::api
