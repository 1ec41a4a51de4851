// SPDX-License-Identifier: Apache-2.0
#include "sampling/rank_share.h"

#include <algorithm>
#include <numeric>

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

uint64_t owner_of(uint64_t index, uint64_t dataset_size, uint64_t rank_count) {
  PENSTOCK_ASSERT(index < dataset_size, "only samples of the dataset have owners");
  return static_cast<uint64_t>(static_cast<unsigned __int128>(index) * rank_count / dataset_size);
}

RankShare::Part RankShare::part(uint64_t step) const { return part_of(options_.rank, step_part(step)); }

RankShare::Part RankShare::step_part(uint64_t step) const {
  PENSTOCK_ASSERT(step >= options_.first_step && step < step_count(), "the step must be within the epoch");
  const uint64_t first = options_.first_sample + (step - options_.first_step) * options_.step_size;
  uint64_t count = std::min(options_.step_size, sample_count_ - first);
  const uint64_t ranks = options_.rank_count;
  if (count < options_.step_size) {
    // All ranks have as many samples as the rank with the most, and at least one.
    const bool is_even = options_.remainder == Remainder::kPad || count < ranks;
    if (is_even) count = (count + ranks - 1) / ranks * ranks;
  }
  return {.first = first, .count = count};
}

RankShare::Part RankShare::part_of(uint64_t rank, const Part& step) const {
  const uint64_t begin = step.count * rank / options_.rank_count;
  const uint64_t end = step.count * (rank + 1) / options_.rank_count;
  return {.first = step.first + begin, .count = end - begin};
}

std::vector<uint64_t> RankShare::owned_samples(uint64_t step, std::span<const uint64_t> owners) const {
  const Part whole = step_part(step);
  PENSTOCK_ASSERT(owners.size() == whole.count, "each sample of the step must have an owner");
  std::vector<uint64_t> room(options_.rank_count);
  for (uint64_t rank = 0; rank < room.size(); ++rank) room[rank] = part_of(rank, whole).count;
  std::vector<uint64_t> places;
  std::vector<uint64_t> rest;  // no owner takes them
  for (uint64_t at = 0; at < owners.size(); ++at) {
    if (room.at(owners[at]) == 0) {
      rest.push_back(whole.first + at);
      continue;
    }
    --room[owners[at]];
    if (owners[at] == options_.rank) places.push_back(whole.first + at);
  }
  const auto before = std::accumulate(room.begin(), room.begin() + static_cast<ptrdiff_t>(options_.rank), uint64_t{0});
  const auto taken = rest.begin() + static_cast<ptrdiff_t>(before);
  places.insert(places.end(), taken, taken + static_cast<ptrdiff_t>(room[options_.rank]));
  std::ranges::sort(places);
  return places;
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
