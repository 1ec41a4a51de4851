// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of a loader, written by make_state() and read by read_state(), in the format of Python's loader
// (python/penstock/loader/loader_state.py): the generator states before the epoch, and the number of its batches that
// were delivered. Resuming restores these generators, starts the epoch again and skips the batches that were delivered.
// If batches were delivered or committed in any order, the state names the ones that others have overtaken.
// The public class State holds such a state; it is implemented here, too.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/commit_ledger.h"
#include "dataset/batch_reader.h"
#include "loader/stream.h"
#include "penstock/any_dataset.h"
#include "penstock/options.h"
#include "penstock/state.h"
#include "penstock/value.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// Draws a seed as torch's loader does: from `generator`, or without one from torch's default generator.
int64_t draw_seed(const std::optional<at::Generator>& generator);

// The states of the generators that an epoch's order and base seed are drawn from. A value type.
class GeneratorSnapshot {
 public:
  // Captures the current states. `own` is the generator that the program passed to the loader.
  static GeneratorSnapshot take(const std::optional<at::Generator>& own);
  // Leaves out torch's default generator, which differs between the ranks of a job.
  static GeneratorSnapshot take_own(const std::optional<at::Generator>& own);
  // Throws for a value that neither to_value() nor Python's loader made.
  static GeneratorSnapshot from_value(const Value& value);

  // The part "generators" of a state. States of Python-only generators in a loaded state are kept.
  Value to_value() const;

  void restore_default() const;
  void restore_own(const std::optional<at::Generator>& own) const;
  bool is_current() const;

 private:
  at::Tensor of_default_;  // torch's default generator; undefined in a state that leaves it out
  at::Tensor of_own_;      // undefined if there is none
  Value of_random_;        // Python's `random`, and numpy's: none in a state made by C++
  Value of_numpy_;
};

// Sets torch's default generator to a snapshot's state for the duration of its scope.
class GeneratorsReplayed {
 public:
  explicit GeneratorsReplayed(const GeneratorSnapshot& snapshot);
  GeneratorsReplayed(const GeneratorsReplayed&) = delete;
  GeneratorsReplayed& operator=(const GeneratorsReplayed&) = delete;
  ~GeneratorsReplayed();

 private:
  GeneratorSnapshot before_;
};

// The dataset's name in messages: of its class, in its plug-in, or of its factory.
std::string title_of(const AnyDataset& dataset);

// The properties that determine the stream, apart from the dataset's content.
struct BuiltLoader {
  bool is_iterable = false;
  std::optional<int64_t> sample_count;  // for a map-style dataset
  uint32_t shard_count = 1;
  std::optional<std::string> selection = {};  // of a filtered dataset
  const Options* options = nullptr;

  // Of a map-style dataset: the samples of an epoch, over all ranks; none for a sampler of unknown size.
  std::optional<int64_t> order_size() const { return options->sampler ? options->sampler->size() : sample_count; }
  // The current states of the generators that the stream is drawn from.
  GeneratorSnapshot take_generators() const;
  // The part "built" of a state.
  Value to_value() const;
};

// The batches of an epoch with so many samples, which ranks do not share.
int64_t batch_count_of(const Options& options, int64_t sample_count);

// The record of one epoch.
struct EpochAccount {
  int64_t epoch = 0;        // its index, from 0
  GeneratorSnapshot start;  // before the epoch's first draw
  std::optional<int64_t> base_seed = {};
  std::shared_ptr<loader::EpochProgress> progress = {};  // shared with the stream
  std::optional<sampling::RankShare> share = {};         // the rank's share, if ranks share an order
  // The shard states that the epoch was resumed from, until workers send newer ones.
  std::map<uint32_t, Value> resumed_states = {};
  PlacesLeft resumed_left = {};
  std::optional<DeliveredPlaces> delivered = {};  // if batches may be delivered in any order
  std::shared_ptr<OpenEpoch> commits = {};        // shared with the ledger, if the program commits batches
};

// The batches of an epoch that are left: not delivered, or not committed if the program commits batches.
PlacesLeft left_of(const EpochAccount& account, const CommitLedger* ledger);

// The position at which a resumed epoch continues.
struct ResumePoint {
  int64_t base_seed = 0;
  uint64_t answered_count = 0;
  uint64_t yielded_count = 0;
  PlacesLeft left = {};
  uint64_t sample_count = 0;                 // samples of the order before left.through, if ranks share an order
  std::vector<sampling::StepRun> runs = {};  // of the steps in left.missing, then
  std::optional<uint32_t> last_shard_id = {};
  std::map<uint32_t, dataset::BatchReader::ShardStart> starts = {};  // for an iterable dataset
  std::map<uint32_t, Value> shard_states = {};
};

// A rank's share of an epoch that continues there.
sampling::RankShareOptions share_at(sampling::RankShareOptions share, const ResumePoint& point);

// A parsed state.
struct LoadedState {
  int64_t epoch = 0;
  GeneratorSnapshot generators;
  bool is_finished_in_epoch = false;      // set by a program that adjusted the state past the epoch's end
  std::optional<ResumePoint> point = {};  // none between epochs
  CommitsState commits = {};
};

// `epoch_count` epochs have started. `account` describes the last one; null before the first. `ledger` is null if the
// program commits no batches. The part "commits" is left to with_commits().
Value make_state(const BuiltLoader& built, const EpochAccount* account, int64_t epoch_count,
                 const CommitLedger* ledger);

// The state with the current commits of earlier epochs.
Value with_commits(const Value& state, CommitLedger& ledger);

// The state of a job of ranks, in which the commits are the second item of the part "sampler", and back: as in Python's
// (python/penstock/loader/rank_states.py). A state without commits stays as it is.
Value sealed(const Value& state);
Value opened(const Value& state);

// Throws Error kValue for an invalid state and for the state of a loader with a different stream.
LoadedState read_state(const BuiltLoader& built, const Value& given);

}  // namespace penstock::api

namespace penstock {

// The library's access to the internals of a State.
struct StateAccess {
  static State make(Value value);
  static const Value& value_of(const State& state);
};

}  // namespace penstock
