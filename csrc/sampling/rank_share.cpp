// SPDX-License-Identifier: Apache-2.0
#include "sampling/rank_share.h"

#include <algorithm>

#include "base/result.h"

namespace penstock::sampling {

RankShare::RankShare(uint64_t sample_count, const RankShareOptions& options)
    : sample_count_(sample_count), options_(options) {
  PENSTOCK_ASSERT(options.rank < options.rank_count && options.step_size >= options.rank_count,
                  "every rank must have a sample of each step");
  const uint64_t left = sample_count - std::min(options.first_sample, sample_count);
  const bool has_last = options.remainder != Remainder::kDrop && left % options.step_size > 0;
  own_step_count_ = left / options.step_size + (has_last ? 1 : 0);
}

RankShare::Part RankShare::part(uint64_t step) const {
  PENSTOCK_ASSERT(step >= options_.first_step && step < step_count(), "the step must be within the epoch");
  const uint64_t first = options_.first_sample + (step - options_.first_step) * options_.step_size;
  uint64_t count = std::min(options_.step_size, sample_count_ - first);
  const uint64_t ranks = options_.rank_count;
  if (count < options_.step_size) {
    // All ranks have as many samples as the rank with the most, and at least one.
    const bool is_even = options_.remainder == Remainder::kPad || count < ranks;
    if (is_even) count = (count + ranks - 1) / ranks * ranks;
  }
  const uint64_t begin = count * options_.rank / ranks;
  const uint64_t end = count * (options_.rank + 1) / ranks;
  return {.first = first + begin, .count = end - begin};
}

std::vector<uint64_t> RankShare::samples(uint64_t step) const {
  const Part run = part(step);
  std::vector<uint64_t> places(run.count);
  for (uint64_t at = 0; at < run.count; ++at) places[at] = sample_at(run.first + at);
  return places;
}

uint64_t RankShare::sample_at(uint64_t place) const {
  if (place < sample_count_) return place;
  const uint64_t last = options_.first_sample + (own_step_count_ - 1) * options_.step_size;
  return last + (place - last) % (sample_count_ - last);
}

uint64_t RankShare::samples_before(uint64_t step) const {
  if (step <= options_.first_step) return std::min(options_.first_sample, sample_count_);
  const uint64_t last = std::min(step, step_count()) - options_.first_step;
  return std::min(sample_count_, options_.first_sample + last * options_.step_size);
}

}  // namespace penstock::sampling
