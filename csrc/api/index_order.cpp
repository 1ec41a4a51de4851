// SPDX-License-Identifier: Apache-2.0
#include "api/index_order.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <utility>

#include "api/exceptions.h"
#include "base/process.h"
#include "penstock/sampler.h"

namespace penstock::api {

SamplerOrder::SamplerOrder(std::shared_ptr<Sampler> sampler, std::optional<int64_t> batch_size, bool drop_last,
                           PlacesLeft left)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last), left_(std::move(left)) {}

std::optional<loader::IndexSource::Indices> SamplerOrder::next() {
  if (!std::exchange(has_resumed_, true)) resume();
  uint64_t first_place = 0;
  if (!missing_.empty()) {
    first_place = missing_.front().first_place;
    indices_ = std::move(missing_.front().indices);
    missing_.pop_front();
  } else {
    auto indices = pull();
    if (!indices) return std::nullopt;
    indices_ = *std::move(indices);
    first_place = first_place_ - indices_.size();
  }
  const auto kind = batch_size_ ? wire::IndexKind::kIntegers : wire::IndexKind::kInteger;
  return Indices{.kind = kind, .body = std::as_bytes(std::span(indices_)), .first_place = first_place};
}

void SamplerOrder::resume() {
  auto missing = left_.missing.begin();
  for (uint64_t place = 0; place < left_.through; ++place) {
    auto indices = pull();
    if (!indices) {
      refuse("the state was taken after " + std::to_string(place) +
             " batches, but the sampler has no batch after these; create the loader with the same sampler, or load the "
             "state as it was saved");
    }
    if (missing == left_.missing.end() || *missing != place) continue;
    ++missing;
    const uint64_t first_place = first_place_ - indices->size();
    missing_.push_back({.indices = *std::move(indices), .first_place = first_place});
  }
}

std::optional<std::vector<int64_t>> SamplerOrder::pull() {
  if (is_at_end_) return std::nullopt;
  auto indices = sampler_->next(batch_size_.value_or(1));
  const bool is_short = indices && batch_size_ && static_cast<int64_t>(indices->size()) < *batch_size_;
  if (indices && indices->empty()) refuse("the sampler returned an empty batch; return std::nullopt to end an epoch");
  if (indices && !batch_size_ && indices->size() != 1) {
    refuse("the sampler returned " + std::to_string(indices->size()) +
           " indices to a loader without a batch size; it must return 1 at a time");
  }
  if (!indices || (is_short && drop_last_)) {
    is_at_end_ = true;
    return std::nullopt;
  }
  first_place_ += indices->size();
  return indices;
}

SharedSamplerOrder::SharedSamplerOrder(std::shared_ptr<Sampler> sampler, int64_t size,
                                       const sampling::RankShareOptions& options, std::vector<uint64_t> missing)
    : sampler_(std::move(sampler)),
      options_(options),
      share_(static_cast<uint64_t>(size), options),
      size_(static_cast<uint64_t>(size)),
      missing_(std::move(missing)),
      step_(options.first_step) {}

std::optional<loader::IndexSource::Indices> SharedSamplerOrder::next() {
  const bool is_missing = missing_count_ < missing_.size();
  if (!is_missing && step_ >= share_.step_count()) return std::nullopt;
  const uint64_t step = is_missing ? missing_[missing_count_++] : step_++;
  const auto whole = share_.order_part(step);
  while (position_ < whole.first) static_cast<void>(pull(whole.first - position_));
  last_step_ = {.indices = pull(whole.count), .first_place = whole.first};
  indices_.clear();
  for (const uint64_t place : share_.samples(step)) indices_.push_back(last_step_.indices[place - whole.first]);
  return Indices{.kind = wire::IndexKind::kIntegers,
                 .body = std::as_bytes(std::span(indices_)),
                 .first_place = share_.part(step).first};
}

std::vector<int64_t> SharedSamplerOrder::pull(uint64_t count) {
  auto indices = sampler_->next(static_cast<int64_t>(count));
  const size_t seen = indices ? indices->size() : 0;
  if (seen != count) {
    refuse("with shard_by_rank, the sampler must return all requested indices: it has a size() of " +
           std::to_string(size_) + " and returned " + std::to_string(seen) + " indices after " +
           std::to_string(position_) + ", where " + std::to_string(count) + " were requested");
  }
  position_ += count;
  return *std::move(indices);
}

namespace {

std::string format_optional(const std::optional<int64_t>& value) { return value ? std::to_string(*value) : "None"; }

std::optional<int64_t> to_integer(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

JobPlace place_in_environment() {
  const auto rank = environment("RANK");
  const auto world_size = environment("WORLD_SIZE");
  if (!rank || !world_size) return {};
  const auto rank_number = to_integer(*rank);
  const auto world_number = to_integer(*world_size);
  if (!rank_number || !world_number) {
    refuse("RANK and WORLD_SIZE must be integers, as torchrun sets them, got RANK='" + *rank + "' and WORLD_SIZE='" +
           *world_size + "'");
  }
  return {*rank_number, *world_number};
}

void check_without_ranks(const Options& options) {
  const std::pair<const char*, std::optional<int64_t>> given[] = {
      {"rank", options.rank}, {"world_size", options.world_size}, {"global_batch_size", options.global_batch_size}};
  for (const auto& [name, value] : given) {
    if (!value) continue;
    refuse(std::string(name) + "=" + format_optional(value) + " requires shard_by_rank; set shard_by_rank, or leave " +
           name + " unset");
  }
  if (options.remainder) {
    refuse("remainder requires shard_by_rank; set shard_by_rank, or leave remainder unset");
  }
}

}  // namespace

JobPlace place_in_job(const Options& options) {
  if (options.rank.has_value() != options.world_size.has_value()) {
    refuse("rank and world_size must be passed together, got rank=" + format_optional(options.rank) +
           " and world_size=" + format_optional(options.world_size) +
           "; pass both, or neither to use the values of this process");
  }
  const JobPlace job = options.rank ? JobPlace{*options.rank, *options.world_size} : place_in_environment();
  if (job.rank < 0 || job.rank >= job.world_size) {
    refuse("rank and world_size must satisfy 0 <= rank < world_size, got rank=" + std::to_string(job.rank) +
           " and world_size=" + std::to_string(job.world_size) + "; correct them");
  }
  return job;
}

Options with_ranks(Options options) {
  if (!options.shard_by_rank) {
    check_without_ranks(options);
    return options;
  }
  if (!options.batch_size) {
    refuse("shard_by_rank requires a batch size; pass batch_size or global_batch_size");
  }
  if (dynamic_cast<const DistributedSampler*>(options.sampler.get()) != nullptr) {
    refuse(
        "shard_by_rank must not be combined with a DistributedSampler, which already shards the samples; omit one of "
        "the two");
  }
  if (options.sampler && !options.sampler->size()) {
    refuse(
        "shard_by_rank requires a sampler with a size, so that all ranks know the number of steps of an epoch; "
        "implement its size()");
  }
  const auto [rank, world_size] = place_in_job(options);
  options.rank = rank;
  options.world_size = world_size;
  if (!options.remainder) options.remainder = options.drop_last ? Remainder::kDrop : Remainder::kPad;
  if (options.global_batch_size) {
    const int64_t size = *options.global_batch_size;
    if (size < world_size) {
      refuse("global_batch_size is " + std::to_string(size) + " and there are " + std::to_string(world_size) +
             " ranks, but must be at least " + std::to_string(world_size) + ", one sample for each rank");
    }
    if (options.batch_size != 1) {
      refuse("batch_size is " + format_optional(options.batch_size) + " and global_batch_size is " +
             std::to_string(size) +
             "; pass batch_size for a fixed batch size per rank, or global_batch_size for a fixed step size over all "
             "ranks");
    }
    if (size % world_size != 0 && *options.remainder != Remainder::kUneven) {
      refuse("global_batch_size is " + std::to_string(size) + " and there are " + std::to_string(world_size) +
             " ranks, so their batches cannot have the same size; choose a multiple of " + std::to_string(world_size) +
             ", or set remainder to kUneven to allow one more sample on some ranks");
    }
    options.batch_size = size / world_size;
  }
  if (!options.generator) options.generator = at::detail::createCPUGenerator(0);
  return options;
}

Options resharded(Options options, const JobPlace& job) {
  options.rank = job.rank;
  options.world_size = job.world_size;
  if (options.global_batch_size) options.batch_size = 1;  // with_ranks() has set it
  return with_ranks(std::move(options));
}

std::optional<sampling::RankShareOptions> share_of(const Options& options) {
  if (!options.shard_by_rank) return std::nullopt;
  const int64_t step_size = options.global_batch_size.value_or(*options.batch_size * *options.world_size);
  return sampling::RankShareOptions{.rank = static_cast<uint64_t>(*options.rank),
                                    .rank_count = static_cast<uint64_t>(*options.world_size),
                                    .step_size = static_cast<uint64_t>(step_size),
                                    .remainder = static_cast<sampling::Remainder>(*options.remainder)};
}

PulledBatch part_of(const PulledBatch& step, const sampling::RankShareOptions& share) {
  const auto of_step = sampling::RankShare::of_step({.first = step.first_place, .count = step.indices.size()}, share);
  PulledBatch part{.indices = {}, .first_place = of_step.part(0).first};
  for (const uint64_t place : of_step.samples(0)) part.indices.push_back(step.indices[place - step.first_place]);
  return part;
}

}  // namespace penstock::api
