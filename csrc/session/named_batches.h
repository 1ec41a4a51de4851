// SPDX-License-Identifier: Apache-2.0
#pragma once
// NamedBatches decides which batches the workers of a server keep for their next requests (`penstock controller
// --keep`). A batch of a map-style dataset is a pure function of its name: the job with its code and prefixes, the
// samples, the seeds of the epoch, and the place in it. Any request of the same name gets the same bytes.
//
//   names      An entry is found by its whole name. If a job's batches do not depend on their seeds, the samples alone
//              suffice, so that the next epoch of a validation finds them although its seeds differ. Two observations
//              are required for that: no random number was drawn for the batch, and one batch of the job (the *trial*)
//              was made a second time, with other seeds, and had the same values. A dataset that reads a seed without
//              drawing is refuted by the trial.
//   claims     A batch that is being made is claimed by its worker. Requests of other trainers for the same name wait
//              for it, up to kClaimPatience. If a trainer requests it from a second worker, because it is late for the
//              trainer, that worker makes it, too, but not before twice the longest time of the group's batches: a
//              trainer that was served kept batches expects all others as soon.
//   evictions  All entries together never exceed the budget. The victim is of the group (the job) that was unused for
//              kGroupIdle, else of the group with the most bytes, and there the entry that was used longest ago. In the
//              group of the new batch no entry is evicted if its batches recur in each epoch, or if the victim would be
//              of the same epoch and no other trainer has used the group: by age, a cycle longer than the budget would
//              never be hit, and without evictions it is hit by the budget's share. The new batch is then not kept.
//   reuse      Copying a batch that is made quickly costs a job more than it can save. A group with such batches is
//              *sparse* once it has filled the budget and none of them was requested again: it keeps one of
//              kSparseEvery, chosen by their names, until one is.
//   sharing    only within a group, which includes the key of the trainer that has sent the job.
//
// The bytes are elsewhere (server/batch_store.h), under the same numbers. Pure. Thread-compatible.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"

namespace penstock::session {

// A longer time for one batch is unusual; the worker may hang.
constexpr Duration kClaimPatience = std::chrono::seconds(60);
// The time after which a batch may be late: of a group's first batches, and of later ones at least.
constexpr Duration kLateFirst = std::chrono::seconds(10);
constexpr Duration kLateMin = std::chrono::milliseconds(100);
constexpr Duration kGroupIdle = std::chrono::hours(1);
// One of so many batches of a sparse group is kept, to notice that they are requested again.
constexpr uint64_t kSparseEvery = 16;
// The time that copying a batch takes: a part of it for its memory, and a part by its bytes.
constexpr Duration kCopyTime = std::chrono::microseconds(100);
constexpr uint64_t kCopyBytesPerSecond = 1'500'000'000;
// A batch is worth a copy regardless of its use if its making takes this many times as long.
constexpr int64_t kWorthCopies = 33;
// The memory of an entry besides its batch and its name: more than the containers use.
constexpr uint64_t kNameBytes = 512;

// Texts of arbitrary bytes.
struct BatchName {
  std::string group;    // the trainer's key, and the ids of the job and its prefixes
  std::string samples;  // their indices
  std::string epoch;    // the seeds of the epoch
  std::string place;    // its number in the epoch, and the place of its first sample
};

// A worker on behalf of its trainer.
struct Claimant {
  uint64_t worker_id = 0;
  uint64_t trainer_id = 0;

  friend bool operator==(const Claimant&, const Claimant&) = default;
};

// A batch that was made.
struct MadeBatch {
  uint64_t bytes = 0;
  bool draws_nothing = false;
  bool is_cheap = false;  // as by is_cheap()
};

// Whether a copy of a batch with these bytes costs a considerable part of the time that its making took.
bool is_cheap(Duration making, uint64_t bytes);

// Whether it is kept even if its group is sparse.
bool is_chosen(const BatchName& name);

class NamedBatches {
 public:
  using Id = uint64_t;

  struct Found {
    enum class Kind : uint8_t {
      kKept,  // `id` has it
      kMake,  // make it; claimed unless the budget is 0
      kWait,  // another worker is making it
    };
    Kind kind = Kind::kMake;
    Id id = 0;
    bool is_sparse = false;  // of its group, only batches with is_chosen() need to be asked about and admitted
  };
  // With `may_wait`, a kWait is remembered as the wait of this worker, until it is served or stop_waiting().
  Found ask(const BatchName& name, const Claimant& by, bool may_wait, Instant now);
  // Whether the batch need not be asked about, nor admitted: its group is sparse, and it is not chosen.
  bool is_passed_over(const BatchName& name) const;
  void stop_waiting(uint64_t worker_id);
  // Whether a worker waits for a batch of the group that another one is making.
  bool is_awaited(const std::string& group) const;

  // The entry with which the batch just made has to be compared, since it is the trial of its group.
  std::optional<Id> twin_of(const BatchName& name) const;
  enum class Comparison : uint8_t { kEqual, kDifferent, kUnclear };
  void note_comparison(const BatchName& name, Comparison comparison);

  struct Admission {
    std::optional<Id> id{};  // empty: it is not kept, and its claim has ended
    std::vector<Id> evicted{};
  };
  // A batch was made. If it is kept, it counts from now on, and is found once it is settled.
  Admission admit(const BatchName& name, const Claimant& by, const MadeBatch& batch, Instant now);
  // Its bytes are complete. Returns false if it is not kept after all, as another worker was sooner.
  bool settle(Id id);
  // Its bytes could not be stored.
  void drop(Id id);
  // The batch will not be made.
  void release(const BatchName& name, const Claimant& by);
  // It was made and may not be kept, and neither may the others of its job.
  void refuse(const BatchName& name, const Claimant& by, Instant now);
  // Ends the claims and waits of a worker. Returns its entries that were not settled.
  std::vector<Id> leave(uint64_t worker_id);

  // Returns the entries that exceed the new budget. 0: no batch is kept or claimed.
  std::vector<Id> set_budget(uint64_t bytes, Instant now);
  uint64_t budget() const { return budget_; }
  // Of all entries, with their names.
  uint64_t bytes() const { return bytes_; }
  size_t count() const { return entries_.size(); }
  // Of the entries that this worker has made.
  uint64_t bytes_made_by(uint64_t worker_id) const;

 private:
  enum class Seeds : uint8_t {
    kUnknown,     // whether the batches of the group depend on them
    kIrrelevant,  // for a batch made without draws
    kRelevant,
  };
  struct Group {
    Seeds seeds = Seeds::kUnknown;
    uint64_t bytes = 0;
    uint32_t entry_count = 0;  // settled or not
    Instant used_at{};
    Duration longest{};               // from the claim of a batch until it was made
    bool is_shared = false;           // a trainer used the batch of another one with the same seeds
    bool is_full = false;             // its last batch was not kept, as for lack of room: no request waits for others
    uint64_t unused_bytes = 0;        // that were admitted since the last request that found a batch
    bool is_cheap = false;            // its last batch was
    std::string trial{};              // the key of the claim; empty: none
    std::map<uint64_t, Id> by_use{};  // settled entries, the one used longest ago first
  };
  struct Entry {
    std::string group;
    std::string epoch;
    std::string whole_key;
    std::string samples_key;
    Claimant maker;
    uint64_t bytes = 0;  // with its names
    bool draws_nothing = false;
    bool is_settled = false;
    uint64_t use = 0;
  };
  struct Claim {
    Claimant by;
    std::string group;
    Instant since{};
    std::map<uint64_t, uint64_t> waiting{};  // workers, by their trainer
  };
  using Groups = std::map<std::string, Group>;

  std::optional<Id> find(Group& group, const std::string& whole_key, const std::string& samples_key,
                         const Claimant& by);
  Found claim(const std::string& key, const std::string& group, const Claimant& by, bool may_wait, Instant now);
  // Of another batch, or of the same one by another worker.
  bool has_to_wait(Claim& claim, const Claimant& by, bool may_wait, Instant now);
  void end_claim(const std::string& key, const Claimant& by);
  void touch(Group& group, Id id);
  Group& group_of(const std::string& name, Instant now);
  Groups::iterator find_victim(const std::string& own, uint64_t own_bytes, Instant now);
  // Batches that recur in each epoch are requested again, and cost no more than one copy.
  bool is_sparse(const Group& group) const {
    return group.is_cheap && group.seeds != Seeds::kIrrelevant && group.unused_bytes >= budget_;
  }
  bool make_room(const BatchName& name, uint64_t bytes, Instant now, std::vector<Id>& evicted);
  void erase(Id id);
  void forget_if_empty(const std::string& group);

  uint64_t budget_ = 0;
  uint64_t bytes_ = 0;
  Id last_id_ = 0;
  uint64_t use_count_ = 0;
  std::map<uint64_t, uint64_t> bytes_by_worker_;  // of the entries that each has made
  Groups groups_;
  std::unordered_map<Id, Entry> entries_;
  std::unordered_map<std::string, Id> by_whole_;    // settled entries, by their whole names
  std::unordered_map<std::string, Id> by_samples_;  // the ones without draws, by group and samples
  std::map<std::string, Claim> claims_;             // by either key
};

}  // namespace penstock::session
