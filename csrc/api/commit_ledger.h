// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batches of a loader that the program is done with. Without commits the state of a loader covers the batches that
// were delivered; with them, the ones that the program committed, in any order (Options::commit). A batch that was
// delivered and not committed is outstanding: a resumed loader delivers it again. As in Python's loader
// (python/penstock/stream/commits.py): the state of an epoch in progress names the places that are left, and
// outstanding batches of earlier epochs are kept with their indices and seeds, since the sampler has moved on.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "loader/index_source.h"
#include "penstock/batch.h"
#include "penstock/value.h"

namespace penstock::api {

// The places in the order of an epoch that are left: the ones in `missing`, ascending, and all from `through` on.
struct PlacesLeft {
  uint64_t through = 0;
  std::vector<uint64_t> missing = {};

  uint64_t delivered_count() const { return through - missing.size(); }
  // The places that are left when `count` more requests were answered, in order.
  PlacesLeft after(uint64_t count) const;
};

// Records deliveries in any order. Requests that raised an error stay left.
class DeliveredPlaces {
 public:
  explicit DeliveredPlaces(const PlacesLeft& resumed)
      : through_(resumed.through), missing_(resumed.missing.begin(), resumed.missing.end()) {}

  void note(uint64_t place);
  bool is_left(uint64_t place) const { return place >= through_ || missing_.contains(place); }
  PlacesLeft left() const { return {through_, {missing_.begin(), missing_.end()}}; }

 private:
  uint64_t through_;
  std::set<uint64_t> missing_;
};

// The data with which a batch can be made again, in addition to its place and the seeds of its epoch. If ranks share an
// order, the samples of a step, of all ranks.
struct PulledBatch {
  std::vector<int64_t> indices;
  uint64_t first_place = 0;  // of the first sample, in the order of the epoch
};

PulledBatch pulled_of(const loader::IndexSource::Indices& indices);

// Outstanding batches of an earlier epoch, by place: at least one.
struct EarlierEpoch {
  int64_t number = 0;  // of the loader's epochs, from 0
  int64_t seed_epoch = 0;
  int64_t base_seed = 0;
  std::map<uint64_t, PulledBatch> batches = {};

  PlacesLeft left() const;
};

// The part "commits" of a state.
struct CommitsState {
  int64_t next_number = 0;  // of the next epoch, or the one in progress
  std::vector<EarlierEpoch> earlier = {};
};

class CommitLedger;

// One epoch in the ledger, which guards it.
struct OpenEpoch {
  int64_t number = 0;
  int64_t seed_epoch = 0;
  int64_t base_seed = 0;
  DeliveredPlaces places{PlacesLeft()};
  std::set<uint64_t> outstanding = {};
  std::map<uint64_t, PulledBatch> pulled = {};  // not committed, by place
  // Returns the batch at a place again, for an order that is kept elsewhere. Empty otherwise.
  std::function<PulledBatch(uint64_t place)> pull_again = {};
};

// Where a delivered batch is from.
struct CommitMark {
  std::weak_ptr<CommitLedger> ledger;
  uint64_t generation = 0;  // loaded states before the delivery
  BatchId id;
};

// The commits of one loader. Thread-safe, so that other threads may commit; the functions of the stream and of the
// state are for the trainer's thread. `pull_again` is called under the lock, in the trainer's thread.
class CommitLedger : public std::enable_shared_from_this<CommitLedger> {
 public:
  // `title` is the loader's name in messages. `is_single`: an epoch's batches have one index each, uncollated.
  CommitLedger(std::string title, bool is_single) : title_(std::move(title)), is_single_(is_single) {}

  // ---- The stream

  // Starts an epoch. The previous one is over, or was abandoned.
  std::shared_ptr<OpenEpoch> begin_epoch(const PlacesLeft& left, int64_t seed_epoch, int64_t base_seed,
                                         std::function<PulledBatch(uint64_t place)> pull_again);
  void note_pull(OpenEpoch& epoch, uint64_t place, PulledBatch batch);
  std::shared_ptr<const CommitMark> deliver(OpenEpoch& epoch, uint64_t place);
  PlacesLeft left(const OpenEpoch& epoch) const;
  // Whether batches of a loaded state are to be delivered before its epoch.
  bool has_repeats() const;
  // The next epoch of these batches, and its content. There must be one.
  struct Repeat {
    std::shared_ptr<OpenEpoch> epoch;
    EarlierEpoch content;
  };
  Repeat take_repeat();

  // ---- The program

  std::vector<BatchId> outstanding() const;
  // Throw Error kValue if the batch is not outstanding.
  void commit(const BatchId& id);
  void commit(const CommitMark* mark);

  // ---- The state

  // The part "commits" of a state. With `is_between`, the newest epoch is an earlier one, too.
  Value to_state(bool is_between);
  // Continues from a loaded state, and forgets all other commits.
  void load(CommitsState state);

 private:
  using Epochs = std::map<int64_t, std::shared_ptr<OpenEpoch>>;

  OpenEpoch* find(int64_t number) const PENSTOCK_REQUIRES(mutex_);
  void archive() PENSTOCK_REQUIRES(mutex_);
  void commit_locked(const BatchId& id) PENSTOCK_REQUIRES(mutex_);
  Value to_value(const OpenEpoch& epoch) const;
  std::string explain(const BatchId& id, const OpenEpoch* epoch) const PENSTOCK_REQUIRES(mutex_);

  const std::string title_;
  const bool is_single_;
  mutable Mutex mutex_;
  // Epochs are shared with the loader's account of the epoch, and with the order that records its pulls.
  std::shared_ptr<OpenEpoch> newest_ PENSTOCK_GUARDED_BY(mutex_);
  Epochs earlier_ PENSTOCK_GUARDED_BY(mutex_);  // with outstanding batches, by number
  std::deque<std::shared_ptr<OpenEpoch>> to_repeat_ PENSTOCK_GUARDED_BY(mutex_);
  int64_t next_number_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

// The indices of another source, whose pulls are recorded for the ledger. Confined to the trainer's thread.
class RecordedOrder final : public loader::IndexSource {
 public:
  // The epoch continues at `left`. `step_of_ranks` returns the step of all ranks that was pulled last, if ranks share
  // the order; another number of ranks may divide it when it is made again.
  RecordedOrder(std::unique_ptr<loader::IndexSource> order, std::shared_ptr<CommitLedger> ledger,
                std::shared_ptr<OpenEpoch> epoch, PlacesLeft left, std::function<PulledBatch()> step_of_ranks = {});

  std::optional<Indices> next() override;

 private:
  std::unique_ptr<loader::IndexSource> order_;
  std::shared_ptr<CommitLedger> ledger_;  // shared with the loader
  std::shared_ptr<OpenEpoch> epoch_;      // shared with the ledger
  PlacesLeft left_;
  std::function<PulledBatch()> step_of_ranks_;
  uint64_t pull_count_ = 0;
};

// The indices of batches that are made again. Confined to the trainer's thread.
class RepeatedOrder final : public loader::IndexSource {
 public:
  RepeatedOrder(std::map<uint64_t, PulledBatch> batches, wire::IndexKind kind)
      : batches_(std::move(batches)), next_(batches_.begin()), kind_(kind) {}

  std::optional<Indices> next() override;

 private:
  std::map<uint64_t, PulledBatch> batches_;
  std::map<uint64_t, PulledBatch>::const_iterator next_;
  wire::IndexKind kind_;
};

}  // namespace penstock::api
