// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which samples of an epoch's order a rank reads in which step. The order does not depend on ranks: a step
// takes its next step_size samples, and each rank reads one contiguous run of them, or as many of them, first of all
// the ones that it owns and may have cached. So the samples of a step are the same for any number of ranks with the
// same step_size, and all ranks have the same number of steps. Steps of before a resume that are given again keep their
// samples, which the present ranks divide.

#include <cstdint>
#include <span>
#include <vector>

namespace penstock::sampling {

// How to treat the samples that do not fill the last step.
enum class Remainder : uint8_t {  // same as penstock::Remainder
  kPad,                           // the ranks share them evenly; some samples are repeated if necessary
  kDrop,                          // they are left out
  kUneven,  // the ranks share them, some with one more than others; as kPad if there are fewer samples than ranks
};

// Steps of one size, until the next run of steps.
struct StepRun {
  uint64_t first_step = 0;
  uint64_t first_sample = 0;  // in the order
  uint64_t step_size = 1;

  friend bool operator==(const StepRun&, const StepRun&) = default;
};

struct RankShareOptions {
  uint64_t rank = 0;
  uint64_t rank_count = 1;
  uint64_t step_size = 1;  // samples per step, over all ranks: at least rank_count
  Remainder remainder = Remainder::kPad;
  // Where a resumed job continues: after this many steps and samples of the epoch, possibly read by other ranks.
  uint64_t first_step = 0;
  uint64_t first_sample = 0;
  // Steps before first_step that ranks were given and are given again, ascending; possibly of other sizes.
  std::vector<StepRun> earlier = {};

  friend bool operator==(const RankShareOptions&, const RankShareOptions&) = default;
};

// Returns the rank that owns sample `index` of a dataset: each rank owns one of rank_count blocks of nearly equal size.
uint64_t owner_of(uint64_t index, uint64_t dataset_size, uint64_t rank_count);

// A value type.
class RankShare {
 public:
  // For an order of `sample_count` samples.
  RankShare(uint64_t sample_count, const RankShareOptions& options);

  // The number of steps in the epoch, including the steps before first_step.
  uint64_t step_count() const { return options_.first_step + own_step_count_; }

  // A run of places in the order. Places from sample_count on stand for repeated samples, see samples().
  struct Part {
    uint64_t first = 0;
    uint64_t count = 0;

    friend bool operator==(const Part&, const Part&) = default;
  };
  // Returns the samples of this rank in `step`, which is from first_step to step_count() - 1, or one of the earlier.
  Part part(uint64_t step) const;
  // Returns the samples of all ranks in `step`.
  Part step_part(uint64_t step) const;
  // Returns the same without repeated samples.
  Part order_part(uint64_t step) const;
  // Returns whether the ranks can divide a step with this order_part(): without the loss of a sample, and with repeated
  // samples only to fill the last step of an order. False if a step was made for another number of ranks.
  bool can_divide(const Part& step) const;

  // Returns the places of this rank's samples in `step`, ascending, if each rank takes the samples that it owns:
  // `owners` has the owner for each place of step_part(step). Every rank has as many samples as in part(step): of more
  // that it owns, the first ones, and of fewer, the first ones that no owner takes, by rank.
  std::vector<uint64_t> owned_samples(uint64_t step, std::span<const uint64_t> owners) const;

  // Returns the places in the order of the samples of part(step), and of step_part(step): the last step of an order
  // repeats its samples if they are too few.
  std::vector<uint64_t> samples(uint64_t step) const;
  std::vector<uint64_t> step_samples(uint64_t step) const;

  // Returns how many samples of the order the job has been given before `step`: at most sample_count.
  uint64_t samples_before(uint64_t step) const;

  // Returns the runs that these steps, ascending, belong to.
  std::vector<StepRun> runs_of(std::span<const uint64_t> steps) const;

  // Returns the share of an epoch that has only this step, as step 0. It has a sample at least.
  static RankShare of_step(const Part& step, RankShareOptions options);

 private:
  StepRun run_of(uint64_t step) const;
  std::vector<uint64_t> samples_of(uint64_t step, const Part& part) const;
  // Returns the part of `rank` in the part of a step.
  Part part_of(uint64_t rank, const Part& step) const;

  uint64_t sample_count_;
  RankShareOptions options_;
  uint64_t own_step_count_;
};

}  // namespace penstock::sampling
