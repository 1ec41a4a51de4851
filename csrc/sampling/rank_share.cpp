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

StepRun RankShare::run_of(uint64_t step) const {
  if (step >= options_.first_step)
    return {.first_step = options_.first_step, .first_sample = options_.first_sample, .step_size = options_.step_size};
  const auto next = std::ranges::upper_bound(options_.earlier, step, {}, &StepRun::first_step);
  PENSTOCK_ASSERT(next != options_.earlier.begin(), "the step must be one of the epoch that is left");
  return *(next - 1);
}

RankShare::Part RankShare::order_part(uint64_t step) const {
  PENSTOCK_ASSERT(step < step_count(), "the step must be within the epoch");
  const StepRun run = run_of(step);
  const uint64_t first = run.first_sample + (step - run.first_step) * run.step_size;
  PENSTOCK_ASSERT(first < sample_count_, "the step must have samples of the order");
  return {.first = first, .count = std::min(run.step_size, sample_count_ - first)};
}

namespace {

bool is_divided(uint64_t count, const RankShareOptions& options) {
  return count >= options.rank_count && (options.remainder == Remainder::kUneven || count % options.rank_count == 0);
}

}  // namespace

RankShare::Part RankShare::step_part(uint64_t step) const {
  Part part = order_part(step);
  const bool is_earlier = step < options_.first_step;
  const bool is_last = is_earlier ? part.first + part.count == sample_count_ : part.count < options_.step_size;
  // All ranks have as many samples as the rank with the most, and at least one.
  const uint64_t ranks = options_.rank_count;
  if (is_last && !is_divided(part.count, options_)) part.count = (part.count + ranks - 1) / ranks * ranks;
  return part;
}

bool RankShare::can_divide(const Part& step) const {
  const bool is_last = step.first + step.count == sample_count_ && options_.remainder != Remainder::kDrop;
  return is_last || is_divided(step.count, options_);
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

std::vector<uint64_t> RankShare::samples(uint64_t step) const { return samples_of(step, part(step)); }

std::vector<uint64_t> RankShare::step_samples(uint64_t step) const { return samples_of(step, step_part(step)); }

std::vector<uint64_t> RankShare::samples_of(uint64_t step, const Part& part) const {
  const Part whole = order_part(step);
  std::vector<uint64_t> places(part.count);
  for (uint64_t at = 0; at < part.count; ++at) places[at] = whole.first + (part.first + at - whole.first) % whole.count;
  return places;
}

uint64_t RankShare::samples_before(uint64_t step) const {
  if (step < options_.first_step && !options_.earlier.empty()) {
    const StepRun run = run_of(std::max(step, options_.earlier.front().first_step));
    return std::min(sample_count_,
                    run.first_sample + (std::max(step, run.first_step) - run.first_step) * run.step_size);
  }
  if (step <= options_.first_step) return std::min(options_.first_sample, sample_count_);
  const uint64_t last = std::min(step, step_count()) - options_.first_step;
  return std::min(sample_count_, options_.first_sample + last * options_.step_size);
}

std::vector<StepRun> RankShare::runs_of(std::span<const uint64_t> steps) const {
  std::vector<StepRun> runs;
  for (const uint64_t step : steps) {
    const StepRun run = run_of(step);
    const uint64_t first = run.first_sample + (step - run.first_step) * run.step_size;
    const bool continues = !runs.empty() && runs.back().step_size == run.step_size &&
                           runs.back().first_sample + (step - runs.back().first_step) * run.step_size == first;
    if (!continues) runs.push_back({.first_step = step, .first_sample = first, .step_size = run.step_size});
  }
  return runs;
}

RankShare RankShare::of_step(const Part& step, RankShareOptions options) {
  const uint64_t ranks = options.rank_count;
  options.step_size = is_divided(step.count, options) ? step.count : (step.count + ranks - 1) / ranks * ranks;
  if (options.step_size > step.count) options.remainder = Remainder::kPad;
  options.first_step = 0;
  options.first_sample = step.first;
  options.earlier.clear();
  return {step.first + step.count, options};
}

}  // namespace penstock::sampling
