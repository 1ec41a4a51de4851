// SPDX-License-Identifier: Apache-2.0
#include "api/index_order.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "api/exceptions.h"

namespace penstock::api {

SamplerOrder::SamplerOrder(std::shared_ptr<Sampler> sampler, std::optional<int64_t> batch_size, bool drop_last,
                           uint64_t skipped_batch_count)
    : sampler_(std::move(sampler)),
      batch_size_(batch_size),
      drop_last_(drop_last),
      skipped_batch_count_(skipped_batch_count) {}

std::optional<loader::IndexSource::Indices> SamplerOrder::next() {
  for (; skipped_batch_count_ > 0 && !is_at_end_; --skipped_batch_count_) static_cast<void>(pull());
  auto indices = pull();
  if (!indices) return std::nullopt;
  indices_ = *std::move(indices);
  const auto kind = batch_size_ ? wire::IndexKind::kIntegers : wire::IndexKind::kInteger;
  const uint64_t first_place = first_place_ - indices_.size();
  return Indices{.kind = kind, .body = std::as_bytes(std::span(indices_)), .first_place = first_place};
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
                                       const sampling::RankShareOptions& options)
    : sampler_(std::move(sampler)),
      options_(options),
      share_(static_cast<uint64_t>(size), options),
      size_(static_cast<uint64_t>(size)),
      step_(options.first_step) {}

std::optional<loader::IndexSource::Indices> SharedSamplerOrder::next() {
  if (step_ >= share_.step_count()) return std::nullopt;
  while (position_ < options_.first_sample) static_cast<void>(pull(options_.first_sample - position_));
  const uint64_t first = position_;
  const auto samples = pull(std::min(options_.step_size, size_ - position_));
  const uint64_t step = step_++;
  indices_.clear();
  for (const uint64_t place : share_.samples(step)) indices_.push_back(samples[place - first]);
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

}  // namespace penstock::api
