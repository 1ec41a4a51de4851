// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which samples of an epoch's order a rank reads in which step. The order knows no ranks: a step takes the next
// step_size samples of it, and the ranks share them, each a run of its own. So the samples of a step are the same for
// any number of ranks with the same step_size, and all ranks have the same number of steps.

#include <cstdint>
#include <vector>

namespace penstock::sampling {

// What becomes of the samples that do not fill the last step.
enum class Remainder : uint8_t {  // as penstock::Remainder
  kPad,                           // the ranks share them evenly, and some of them are given again to make that so
  kDrop,                          // they are left out
  kUneven,  // the ranks share them, some one more than others; as kPad where there are fewer samples than ranks
};

struct RankShareOptions {
  uint64_t rank = 0;
  uint64_t rank_count = 1;
  uint64_t step_size = 1;  // samples of a step, over all ranks: as many as ranks at least
  Remainder remainder = Remainder::kPad;
  // Where the job goes on: after so many steps and samples of the epoch, which other ranks may have been given.
  uint64_t first_step = 0;
  uint64_t first_sample = 0;

  friend bool operator==(const RankShareOptions&, const RankShareOptions&) = default;
};

// A value type.
class RankShare {
 public:
  // Of an order of `sample_count` samples.
  RankShare(uint64_t sample_count, const RankShareOptions& options);

  // The number of steps in the epoch, those before first_step among them.
  uint64_t step_count() const { return options_.first_step + own_step_count_; }

  // A run of places in the order. Places from sample_count on are those of samples that are given again, sample_at().
  struct Part {
    uint64_t first = 0;
    uint64_t count = 0;

    friend bool operator==(const Part&, const Part&) = default;
  };
  // The samples of this rank in a step, from first_step to step_count() - 1.
  Part part(uint64_t step) const;

  // The places in the order of the samples of part(step).
  std::vector<uint64_t> samples(uint64_t step) const;
  // The place in the order of the sample that is given at `place`: that itself, or one of the last step's.
  uint64_t sample_at(uint64_t place) const;

  // How many samples of the order the job has been given before `step`: at most sample_count.
  uint64_t samples_before(uint64_t step) const;

 private:
  uint64_t sample_count_;
  RankShareOptions options_;
  uint64_t own_step_count_;
};

}  // namespace penstock::sampling
