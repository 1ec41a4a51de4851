// SPDX-License-Identifier: Apache-2.0
#include "session/named_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace penstock::session {
namespace {

using std::chrono::seconds;
using Kind = NamedBatches::Found::Kind;
using Comparison = NamedBatches::Comparison;

constexpr uint64_t kMiB = uint64_t{1} << 20;

BatchName named(int samples, int epoch = 0, const std::string& group = "job of ann") {
  return {.group = group,
          .samples = "samples " + std::to_string(samples),
          .epoch = "epoch " + std::to_string(epoch),
          .place = std::to_string(samples)};
}

class NamedBatchesTest : public testing::Test {
 protected:
  NamedBatchesTest() { names_.set_budget(16 * kMiB, now_); }

  Kind ask(const BatchName& name, const Claimant& by) { return names_.ask(name, by, true, now_).kind; }
  // Makes a batch of 1 MiB that was claimed. Returns whether it is kept.
  bool make(const BatchName& name, const Claimant& by, bool draws_nothing = false,
            Comparison comparison = Comparison::kEqual, bool is_cheap = false) {
    if (names_.twin_of(name)) {
      ++trial_count_;
      names_.note_comparison(name, comparison);
    }
    const auto admission =
        names_.admit(name, by, {.bytes = kMiB - 1024, .draws_nothing = draws_nothing, .is_cheap = is_cheap}, now_);
    evicted_.insert(evicted_.end(), admission.evicted.begin(), admission.evicted.end());
    EXPECT_LE(names_.bytes(), names_.budget());
    return admission.id && names_.settle(*admission.id);
  }
  // One epoch of a loader. Returns how many batches were not made.
  int run(int count, int epoch, const Claimant& by, bool draws_nothing, const std::string& group = "job of ann",
          Comparison comparison = Comparison::kEqual, bool is_cheap = false) {
    int kept_count = 0;
    for (int samples = 0; samples < count; ++samples) {
      const BatchName name = named(samples, epoch, group);
      if (ask(name, by) == Kind::kKept)
        ++kept_count;
      else
        make(name, by, draws_nothing, comparison, is_cheap);
    }
    return kept_count;
  }

  NamedBatches names_;
  Instant now_{seconds(1000)};
  int trial_count_ = 0;
  std::vector<NamedBatches::Id> evicted_;
  const Claimant ann_{.worker_id = 1, .trainer_id = 11};
  const Claimant anns_second_{.worker_id = 2, .trainer_id = 11};
  const Claimant bob_{.worker_id = 3, .trainer_id = 12};
  const Claimant bobs_second_{.worker_id = 4, .trainer_id = 12};
};

TEST_F(NamedBatchesTest, BatchIsFoundByItsWholeName) {
  EXPECT_EQ(ask(named(1), ann_), Kind::kMake);
  EXPECT_TRUE(make(named(1), ann_));
  EXPECT_EQ(ask(named(1), bob_), Kind::kKept);
  EXPECT_EQ(ask(named(2), bob_), Kind::kMake) << "of other samples";
  EXPECT_EQ(ask(named(1, 1), bob_), Kind::kMake) << "of another epoch";
  EXPECT_EQ(ask(named(1, 0, "job of bob"), bob_), Kind::kMake) << "of another job or key";
  BatchName elsewhere = named(1);
  elsewhere.place = "7";
  EXPECT_EQ(ask(elsewhere, bob_), Kind::kMake) << "at another place, where other random numbers are drawn";
}

// Lengths separate the parts of a name.
TEST_F(NamedBatchesTest, PartsOfANameAreNotMixedUp) {
  const BatchName one{.group = "ab", .samples = "c", .epoch = "d", .place = "e"};
  const BatchName other{.group = "a", .samples = "bc", .epoch = "d", .place = "e"};
  ask(one, ann_);
  make(one, ann_, true);
  EXPECT_EQ(ask(other, bob_), Kind::kMake);
}

TEST_F(NamedBatchesTest, NothingIsKeptOrAwaitedWithoutABudget) {
  names_.set_budget(0, now_);
  EXPECT_EQ(ask(named(1), ann_), Kind::kMake);
  EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
  EXPECT_FALSE(make(named(1), ann_));
  EXPECT_EQ(names_.count(), 0);
}

TEST_F(NamedBatchesTest, RequestWaitsForTheWorkerThatIsMakingTheBatch) {
  EXPECT_EQ(ask(named(1), ann_), Kind::kMake);
  EXPECT_EQ(ask(named(1), ann_), Kind::kMake) << "its own claim";
  EXPECT_FALSE(names_.is_awaited("job of ann"));
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  EXPECT_TRUE(names_.is_awaited("job of ann"));
  EXPECT_FALSE(names_.is_awaited("job of bob"));
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait) << "as often as it asks";
  const auto admission = names_.admit(named(1), ann_, {.bytes = kMiB}, now_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait) << "its bytes are not complete";
  EXPECT_TRUE(names_.settle(*admission.id));
  EXPECT_EQ(ask(named(1), bob_), Kind::kKept);
  EXPECT_FALSE(names_.is_awaited("job of ann"));
}

TEST_F(NamedBatchesTest, BatchThatWillNotBeMadeIsMadeByTheOneThatWaits) {
  for (const bool is_dead : {false, true}) {
    ask(named(1), ann_);
    EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
    if (is_dead)
      names_.leave(ann_.worker_id);
    else
      names_.release(named(1), ann_);
    EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
    EXPECT_EQ(ask(named(1), ann_), Kind::kWait);
    names_.release(named(1), bob_);
  }
}

TEST_F(NamedBatchesTest, BytesThatCouldNotBeStoredLeaveNoEntry) {
  ask(named(1), ann_);
  const auto admission = names_.admit(named(1), ann_, {.bytes = kMiB}, now_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  names_.drop(*admission.id);
  EXPECT_EQ(names_.bytes(), 0);
  EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
  const auto unsettled = names_.admit(named(1), bob_, {.bytes = kMiB}, now_);
  EXPECT_EQ(names_.leave(bob_.worker_id), std::vector{*unsettled.id}) << "the worker has ended in between";
  EXPECT_EQ(names_.bytes(), 0);
  EXPECT_FALSE(names_.settle(*unsettled.id));
}

TEST_F(NamedBatchesTest, TrainerWhoseBatchIsLateIsServedByItsSecondWorker) {
  ask(named(0), ann_);
  now_ += seconds(3);
  make(named(0), ann_);
  ask(named(1), ann_);
  now_ += seconds(5);
  EXPECT_EQ(ask(named(1), anns_second_), Kind::kWait) << "twice the longest time has not passed";
  now_ += seconds(1);
  EXPECT_EQ(ask(named(1), anns_second_), Kind::kMake);
  names_.release(named(1), anns_second_);
  ask(named(2), ann_);
  EXPECT_EQ(ask(named(2), bob_), Kind::kWait);
  now_ += seconds(6);
  EXPECT_EQ(ask(named(2), bob_), Kind::kWait);
  EXPECT_EQ(ask(named(2), bobs_second_), Kind::kMake);
}

TEST_F(NamedBatchesTest, NobodyWaitsForAWorkerThatHangs) {
  ask(named(1), ann_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  now_ += kLateFirst;
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  EXPECT_EQ(ask(named(1), bobs_second_), Kind::kMake) << "no batch is known to take that long";
  ask(named(3), ann_);
  now_ += kClaimPatience;
  EXPECT_EQ(ask(named(3), bob_), Kind::kMake);
}

TEST_F(NamedBatchesTest, WaitThatWasEndedDoesNotCount) {
  ask(named(1), ann_);
  ask(named(1), bob_);
  names_.stop_waiting(bob_.worker_id);
  EXPECT_FALSE(names_.is_awaited("job of ann"));
  EXPECT_EQ(ask(named(1), bobs_second_), Kind::kWait);
}

// A validation: the same batches in each epoch, with other seeds.
TEST_F(NamedBatchesTest, BatchesThatDrawNothingAreFoundInTheNextEpochAfterOneTrial) {
  EXPECT_EQ(run(8, 0, ann_, true), 0);
  EXPECT_EQ(run(8, 1, ann_, true), 7);
  EXPECT_EQ(trial_count_, 1);
  EXPECT_EQ(run(8, 2, ann_, true), 8);
  EXPECT_EQ(run(8, 3, bob_, true), 8) << "of another trainer with the same job";
  EXPECT_EQ(names_.count(), 8) << "the batch of the trial is not kept twice";
}

TEST_F(NamedBatchesTest, BatchesThatDrawAreNotFoundInTheNextEpoch) {
  EXPECT_EQ(run(4, 0, ann_, false), 0);
  EXPECT_EQ(run(4, 1, ann_, false), 0);
  EXPECT_EQ(trial_count_, 0);
  EXPECT_EQ(run(4, 0, bob_, false), 4);
}

// It computes with torch.initial_seed(), without drawing.
TEST_F(NamedBatchesTest, DatasetThatReadsASeedIsRefutedByTheTrial) {
  run(4, 0, ann_, true);
  EXPECT_EQ(run(4, 1, ann_, true, "job of ann", Comparison::kDifferent), 0);
  EXPECT_EQ(trial_count_, 1);
  EXPECT_EQ(run(4, 2, ann_, true, "job of ann", Comparison::kDifferent), 0);
  EXPECT_EQ(trial_count_, 1);
  EXPECT_EQ(run(4, 1, bob_, true), 4) << "with the same seeds";
}

TEST_F(NamedBatchesTest, UnclearComparisonIsRepeated) {
  run(4, 0, ann_, true);
  EXPECT_EQ(run(2, 1, ann_, true, "job of ann", Comparison::kUnclear), 0);
  EXPECT_EQ(trial_count_, 2);
  EXPECT_EQ(run(4, 2, ann_, true), 3);
}

TEST_F(NamedBatchesTest, OthersWaitForTheTrial) {
  run(4, 0, ann_, true);
  EXPECT_EQ(ask(named(0, 1), ann_), Kind::kMake);
  EXPECT_EQ(ask(named(1, 1), bob_), Kind::kWait);
  EXPECT_EQ(ask(named(9, 1), bobs_second_), Kind::kMake) << "it was never made";
  make(named(0, 1), ann_, true);
  EXPECT_EQ(ask(named(1, 1), bob_), Kind::kKept);
}

TEST_F(NamedBatchesTest, TrialThatFailsIsFollowedByAnother) {
  run(4, 0, ann_, true);
  EXPECT_EQ(ask(named(0, 1), ann_), Kind::kMake);
  names_.release(named(0, 1), ann_);  // it raised an exception
  EXPECT_EQ(ask(named(1, 1), bob_), Kind::kMake);
  EXPECT_TRUE(names_.twin_of(named(1, 1)).has_value());
  EXPECT_FALSE(names_.twin_of(named(0, 1)).has_value());
}

TEST_F(NamedBatchesTest, JobThatDrawsForSomeBatchesKeepsTheseBySeed) {
  run(4, 0, ann_, true);
  run(4, 1, ann_, true);
  ask(named(5, 1), ann_);
  make(named(5, 1), ann_, false);
  EXPECT_EQ(ask(named(5, 2), ann_), Kind::kMake);
  names_.release(named(5, 2), ann_);
  EXPECT_EQ(ask(named(5, 1), bob_), Kind::kKept);
}

// An age-based eviction would never hit a cycle that is longer than the budget.
TEST_F(NamedBatchesTest, CycleLongerThanTheBudgetIsHitByTheShareThatFits) {
  for (const bool is_cheap : {false, true}) {
    const std::string group = is_cheap ? "cheap" : "dear";
    names_.set_budget(0, now_);
    names_.set_budget(16 * kMiB, now_);
    const auto epoch = [&](int number) { return run(32, number, ann_, true, group, Comparison::kEqual, is_cheap); };
    epoch(0);
    EXPECT_GE(epoch(1), 14) << group;
    EXPECT_EQ(epoch(2), static_cast<int>(names_.count())) << group;
    EXPECT_EQ(epoch(3), static_cast<int>(names_.count())) << group;
    EXPECT_GE(names_.count(), 15) << group;
    EXPECT_FALSE(names_.is_passed_over(named(31, 4, group))) << group;
  }
}

// Jobs with one seed that are close together, in epochs longer than the budget.
TEST_F(NamedBatchesTest, JobsThatFollowEachOtherShareALongEpoch) {
  int made_count = 0;
  for (int samples = 0; samples < 204; ++samples) {
    for (const auto& [by, place] : {std::pair(ann_, samples), std::pair(bob_, samples - 4)}) {
      if (place < 0 || place >= 200) continue;
      if (ask(named(place), by) == Kind::kKept) continue;
      make(named(place), by);
      ++made_count;
    }
  }
  EXPECT_EQ(made_count, 200);
  EXPECT_GT(evicted_.size(), 180);
}

// A long training in between does not push a validation out.
TEST_F(NamedBatchesTest, LargestGroupMakesRoom) {
  run(4, 0, ann_, true, "validation");
  for (int epoch = 0; epoch < 3; ++epoch) run(100, epoch, ann_, false, "training");
  EXPECT_EQ(run(4, 1, ann_, true, "validation"), 3);
}

TEST_F(NamedBatchesTest, GroupThatIsIdleMakesRoomFirst) {
  run(4, 0, ann_, true, "yesterday's");
  now_ += seconds(1);
  run(10, 0, ann_, false, "other");
  now_ += kGroupIdle;
  run(12, 1, ann_, false, "today's");
  EXPECT_EQ(run(4, 0, bob_, true, "yesterday's"), 0);
}

TEST_F(NamedBatchesTest, BatchLargerThanTheBudgetIsNotKeptAndNobodyWaitsForTheNext) {
  names_.set_budget(kMiB / 2, now_);
  ask(named(1), ann_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  EXPECT_FALSE(make(named(1), ann_));
  EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
  EXPECT_EQ(ask(named(1), ann_), Kind::kMake) << "without a wait";
  EXPECT_EQ(names_.bytes(), 0);
}

TEST_F(NamedBatchesTest, NobodyWaitsForBatchesThatMayNotBeKept) {
  ask(named(1), ann_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kWait);
  names_.refuse(named(1), ann_, now_);
  EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
  EXPECT_EQ(ask(named(2), ann_), Kind::kMake);
  EXPECT_EQ(ask(named(2), bob_), Kind::kMake);
}

TEST_F(NamedBatchesTest, SmallerBudgetEvictsWhatWasUsedLongestAgo) {
  run(8, 0, ann_, false);
  ask(named(0), bob_);
  const auto evicted = names_.set_budget(4 * kMiB, now_);
  EXPECT_EQ(evicted.size(), 4);
  EXPECT_LE(names_.bytes(), 4 * kMiB);
  EXPECT_EQ(ask(named(0), bob_), Kind::kKept);
  EXPECT_EQ(ask(named(1), bob_), Kind::kMake);
  names_.release(named(1), bob_);
  EXPECT_EQ(names_.set_budget(0, now_).size(), 4);
  EXPECT_EQ(names_.bytes(), 0);
}

TEST_F(NamedBatchesTest, JobThatRequestsNothingAgainKeepsFewCheapBatches) {
  const auto made = [&](int samples, int epoch, const Claimant& by, bool is_cheap) {
    const BatchName name = named(samples, epoch);
    return ask(name, by) != Kind::kKept && make(name, by, false, Comparison::kEqual, is_cheap);
  };
  int kept_count = 0;
  for (int samples = 0; samples < 16; ++samples) kept_count += made(samples, 0, ann_, true);
  EXPECT_GE(kept_count, 15) << "as long as the budget lasts";
  made(0, 1, ann_, true);
  kept_count = 0;
  int chosen_count = 0;
  for (int samples = 1; samples < 160; ++samples) {
    kept_count += made(samples, 1, ann_, true);
    chosen_count += is_chosen(named(samples, 1));
  }
  EXPECT_EQ(kept_count, chosen_count);
  EXPECT_GE(chosen_count, 5);
  EXPECT_LE(chosen_count, 20);
  EXPECT_TRUE(made(0, 2, ann_, false)) << "not cheap";

  // A job with the same seeds finds the first one that was chosen; from then on all are kept, and none is made twice.
  made(0, 3, ann_, true);
  bool was_chosen = false;
  for (int samples = 0; samples < 160; ++samples) {
    made(samples, 3, ann_, true);
    was_chosen |= is_chosen(named(samples, 3));
    EXPECT_EQ(ask(named(samples, 3), bob_) == Kind::kKept, was_chosen) << samples;
    if (!was_chosen) names_.release(named(samples, 3), bob_);
  }
  EXPECT_TRUE(was_chosen);
}

TEST_F(NamedBatchesTest, SparseGroupIsReportedUntilABatchIsFound) {
  const auto made = [&](int samples, int epoch) {
    const bool is_sparse = names_.ask(named(samples, epoch), ann_, true, now_).is_sparse;
    make(named(samples, epoch), ann_, false, Comparison::kEqual, true);
    return is_sparse;
  };
  for (int samples = 0; samples < 16; ++samples) EXPECT_FALSE(made(samples, 0));
  made(0, 1);
  int samples = 1;
  for (; !is_chosen(named(samples, 1)); ++samples) EXPECT_TRUE(made(samples, 1)) << samples;
  EXPECT_TRUE(made(samples, 1));
  const auto found = names_.ask(named(samples, 1), bob_, true, now_);
  EXPECT_EQ(found.kind, Kind::kKept);
  EXPECT_FALSE(found.is_sparse);
  EXPECT_FALSE(made(samples + 1, 1));
}

TEST_F(NamedBatchesTest, CopyIsWorthAThirtiethOfTheTimeOfTheMaking) {
  constexpr uint64_t kBytes = 15'000'000;  // 10 ms and 0.1 ms
  EXPECT_TRUE(is_cheap(std::chrono::milliseconds(330), kBytes));
  EXPECT_FALSE(is_cheap(std::chrono::milliseconds(340), kBytes));
  EXPECT_TRUE(is_cheap(std::chrono::milliseconds(3), 0));
  EXPECT_FALSE(is_cheap(std::chrono::milliseconds(4), 0));
}

TEST_F(NamedBatchesTest, BytesCountForTheWorkerThatMadeThem) {
  run(3, 0, ann_, false);
  ask(named(9), bob_);
  make(named(9), bob_);
  EXPECT_EQ(names_.bytes_made_by(1) + names_.bytes_made_by(3), names_.bytes());
  EXPECT_GT(names_.bytes_made_by(1), 2 * names_.bytes_made_by(3));
  names_.set_budget(0, now_);
  EXPECT_EQ(names_.bytes_made_by(1), 0);
}

// Any sequence of events: the budget holds, an entry that is found was made under that name, and with the same values
// for all seeds that it is found with.
TEST_F(NamedBatchesTest, RandomEventsNeverMixUpBatches) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](uint32_t count) { return static_cast<int>(random() % count); };
    NamedBatches names;
    names.set_budget((1 + below(12)) * kMiB, now_);
    // The value of a batch: a function of its name; of a group without seeds, a function of its samples.
    const auto value_of = [](const BatchName& name) {
      const bool uses_seeds = name.group != "plain";
      return name.group + name.samples + (uses_seeds ? name.epoch + name.place : "");
    };
    std::map<NamedBatches::Id, std::string> stored;
    struct Making {
      BatchName name;
      Claimant by;
    };
    std::vector<Making> making;
    Instant now = now_;
    for (int step = 0; step < 400; ++step) {
      now += std::chrono::milliseconds(below(3000));
      const Claimant by{.worker_id = static_cast<uint64_t>(1 + below(4)), .trainer_id = 0};
      const Claimant claimant{.worker_id = by.worker_id, .trainer_id = 10 + by.worker_id % 2};
      const std::string group = below(2) == 0 ? "plain" : "reads its seed";
      const BatchName name = named(below(10), below(3), group);
      const int choice = below(20);
      if (choice < 12) {
        const auto found = names.ask(name, claimant, below(2) == 0, now);
        if (found.kind == Kind::kKept) {
          ASSERT_EQ(stored.at(found.id), value_of(name)) << "seed " << seed << ", step " << step;
        } else if (found.kind == Kind::kMake) {
          making.push_back({name, claimant});
        }
      } else if (choice < 18 && !making.empty()) {
        const size_t place = static_cast<size_t>(below(static_cast<uint32_t>(making.size())));
        const Making made = making[place];
        making.erase(making.begin() + static_cast<ptrdiff_t>(place));
        if (below(10) == 0) {
          names.release(made.name, made.by);
          continue;
        }
        if (const auto twin = names.twin_of(made.name)) {
          const bool is_equal = stored.at(*twin) == value_of(made.name);
          names.note_comparison(made.name, is_equal ? Comparison::kEqual : Comparison::kDifferent);
        }
        const auto admission =
            names.admit(made.name, made.by, {.bytes = kMiB, .draws_nothing = true, .is_cheap = below(2) == 0}, now);
        for (const auto id : admission.evicted) ASSERT_EQ(stored.erase(id), 1);
        if (admission.id) {
          if (below(10) == 0)
            names.drop(*admission.id);
          else if (names.settle(*admission.id))
            stored[*admission.id] = value_of(made.name);
        }
      } else if (choice == 18) {
        const auto worker_id = static_cast<uint64_t>(1 + below(4));
        names.leave(worker_id);
        std::erase_if(making, [&](const Making& one) { return one.by.worker_id == worker_id; });
      } else {
        for (const auto id : names.set_budget(below(12) * kMiB, now)) ASSERT_EQ(stored.erase(id), 1);
      }
      ASSERT_LE(names.bytes(), names.budget());
      ASSERT_EQ(names.count(), stored.size());
    }
  }
}

}  // namespace
}  // namespace penstock::session
