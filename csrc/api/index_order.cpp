// SPDX-License-Identifier: Apache-2.0
#include "api/index_order.h"

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
  return Indices{.kind = kind, .body = std::as_bytes(std::span(indices_))};
}

std::optional<std::vector<int64_t>> SamplerOrder::pull() {
  if (is_at_end_) return std::nullopt;
  auto indices = sampler_->next(batch_size_.value_or(1));
  const bool is_short = indices && batch_size_ && static_cast<int64_t>(indices->size()) < *batch_size_;
  if (indices && indices->empty())
    refuse("the sampler gave a batch without indices; it ends an epoch with std::nullopt");
  if (indices && !batch_size_ && indices->size() != 1) {
    refuse("the sampler gave " + std::to_string(indices->size()) +
           " indices to a loader without a batch size, which makes a batch of each sample; 1 is expected");
  }
  if (!indices || (is_short && drop_last_)) {
    is_at_end_ = true;
    return std::nullopt;
  }
  return indices;
}

}  // namespace penstock::api
