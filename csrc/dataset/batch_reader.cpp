// SPDX-License-Identifier: Apache-2.0
#include "dataset/batch_reader.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/copy.h>

#include <string>
#include <typeinfo>
#include <utility>

#include "base/clock.h"
#include "base/result.h"
#include "dataset/collator.h"
#include "dataset/nest_value.h"

namespace penstock::dataset {

PlaceDraws::PlaceDraws(bool seeds_default)
    : seeds_default_(seeds_default),
      of_batch_(at::detail::createCPUGenerator()),
      of_sample_(at::detail::createCPUGenerator()) {}

void PlaceDraws::begin_map_batch(const wire::EpochSeeds& seeds, uint64_t sequence, uint64_t first_place) {
  seeds_ = seeds;
  batch_place_ = {sequence, 0};
  batch_place_size_ = 1;
  first_place_ = first_place;
  sample_place_ = 0;
  has_samples_ = true;
  is_batch_seeded_ = is_sample_seeded_ = false;
  if (is_by_sample()) return begin_collating();
  seed_default(seed_of_batch());
}

void PlaceDraws::begin_shard_batch(const wire::EpochSeeds& seeds, uint64_t shard_id, uint64_t number) {
  seeds_ = seeds;
  batch_place_ = {shard_id, number};
  batch_place_size_ = 2;
  has_samples_ = false;
  is_batch_seeded_ = is_sample_seeded_ = false;
}

void PlaceDraws::begin_sample(uint64_t place) {
  sample_place_ = place;
  is_sample_seeded_ = false;
  if (!is_by_sample()) return;  // the samples of a batch share one sequence of draws
  is_batch_seeded_ = false;
  seed_default(seed_of_sample(wire::SampleSeed::kGlobals));
}

void PlaceDraws::begin_collating() {
  if (is_by_sample()) seed_default(seeds_.seed_at(first_place_, wire::SampleSeed::kCollate));
}

void PlaceDraws::seed_default(uint64_t seed) const {
  if (!seeds_default_) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(seed);
}

at::Generator& PlaceDraws::sample_generator() {
  if (!has_samples_) return batch_generator();
  if (!is_sample_seeded_) {
    of_sample_.set_current_seed(is_by_sample() ? seed_of_sample(wire::SampleSeed::kGenerator)
                                               : seeds_.seed_of_sample(batch_place_[0], sample_place_));
  }
  is_sample_seeded_ = true;
  return of_sample_;
}

at::Generator& PlaceDraws::batch_generator() {
  if (!is_batch_seeded_)
    of_batch_.set_current_seed(is_by_sample() ? seed_of_sample(wire::SampleSeed::kGlobals) : seed_of_batch());
  is_batch_seeded_ = true;
  return of_batch_;
}

BatchReader::BatchReader(std::shared_ptr<Dataset> by_index, std::shared_ptr<IterableDataset> as_streams,
                         ReaderOptions options)
    : by_index_(std::move(by_index)),
      as_streams_(std::move(as_streams)),
      options_(std::move(options)),
      draws_(options_.seeds_default_generator) {
  PENSTOCK_ASSERT((by_index_ == nullptr) != (as_streams_ == nullptr));
  if (!by_index_) return;
  size_ = by_index_->size();
  const Dataset& dataset = *by_index_;
  if (typeid(dataset) == typeid(TensorDataset) && !options_.collate_fn && options_.batch_size)
    rows_ = static_cast<const TensorDataset*>(by_index_.get());
}

Value BatchReader::read(const wire::EpochSeeds& seeds, const BatchPlace& place, std::span<const int64_t> indices,
                        Memory& memory) {
  PENSTOCK_ASSERT(by_index_ != nullptr);
  clock_.begin(clock_now());
  sample_count_ = static_cast<uint32_t>(indices.size());
  index_in_hand_.reset();
  for (const int64_t index : indices) static_cast<void>(checked(index));
  draws_.begin_map_batch(seeds, place.sequence, place.first_place);
  if (rows_ != nullptr) return gather(*rows_, indices, memory);
  if (!options_.batch_size) {
    PENSTOCK_ASSERT(indices.size() == 1);
    return copied(get(indices[0], 0), memory);
  }
  if (!options_.collate_fn) {
    draws_.begin_sample(0);
    if (auto batch = by_index_->get_batch(indices, draws_)) return *std::move(batch);
  }
  return read_samples(indices, memory);
}

Value BatchReader::read_samples(std::span<const int64_t> indices, Memory& memory) {
  if (options_.collate_fn) {
    std::vector<Value> samples;
    samples.reserve(indices.size());
    for (size_t place = 0; place < indices.size(); ++place) samples.push_back(get(indices[place], place));
    index_in_hand_.reset();
    clock_.begin_collate(clock_now());
    draws_.begin_collating();
    return options_.collate_fn(std::move(samples));
  }
  Collator collator(memory, indices.size());
  for (size_t place = 0; place < indices.size(); ++place) {
    const Value sample = get(indices[place], place);
    const Instant got_at = clock_now();
    collator.add(sample);
    clock_.note_copy(clock_now() - got_at);
  }
  clock_.begin_collate(clock_now());
  draws_.begin_collating();
  return collator.finish();
}

Value BatchReader::get(int64_t index, size_t place) {
  index_in_hand_ = index;
  draws_.begin_sample(place);
  const Instant begun_at = clock_now();
  Value sample = by_index_->get(index, draws_);
  clock_.note_sample(clock_now() - begun_at);
  return sample;
}

std::string BatchReader::in_hand() const {
  return index_in_hand_ ? "sample " + std::to_string(*index_in_hand_) + " of the dataset" : "";
}

int64_t BatchReader::checked(int64_t index) const {
  if (index >= 0 && index < size_) return index;
  throw Error(ErrorKind::kValue, "the sampler returned index " + std::to_string(index) + " for a dataset of " +
                                     std::to_string(size_) + " samples, but must return indices from 0 to " +
                                     std::to_string(size_ - 1) + ", inclusive");
}

Value BatchReader::gather(const TensorDataset& rows, std::span<const int64_t> indices, Memory& memory) const {
  Value::Items batch;
  batch.reserve(rows.tensors().size());
  for (const at::Tensor& source : rows.tensors()) {
    std::vector<int64_t> sizes(source.sizes().begin(), source.sizes().end());
    sizes[0] = static_cast<int64_t>(indices.size());
    at::Tensor target = memory.empty(sizes, source.scalar_type());
    const size_t row_bytes = source.size(0) == 0 ? 0 : source.nbytes() / static_cast<size_t>(source.size(0));
    if (row_bytes > 0) {
      const CopyBytes copy = copy_of_rows(indices.size(), row_bytes);
      auto* to = static_cast<std::byte*>(target.mutable_data_ptr());
      const auto* from = static_cast<const std::byte*>(source.const_data_ptr());
      for (size_t place = 0; place < indices.size(); ++place)
        copy(to + place * row_bytes, from + static_cast<size_t>(indices[place]) * row_bytes, row_bytes);
    }
    batch.emplace_back(std::move(target));
  }
  return Value::list(std::move(batch));
}

std::optional<Value> BatchReader::read_shard(const wire::EpochSeeds& seeds, uint32_t shard_id, const ShardStart& start,
                                             Memory& memory) {
  PENSTOCK_ASSERT(as_streams_ != nullptr);
  auto found = shards_.find(shard_id);
  if (found != shards_.end() && found->second.seeds != seeds) {
    shards_.erase(found);
    found = shards_.end();
  }
  OpenShard& shard = found != shards_.end() ? found->second : open(seeds, shard_id, start, memory);
  return read_next(shard, shard_id, memory);
}

BatchReader::OpenShard& BatchReader::open(const wire::EpochSeeds& seeds, uint32_t shard_id, const ShardStart& start,
                                          Memory& memory) {
  draws_.begin_shard_batch(seeds, shard_id, 0);
  OpenShard shard{.seeds = seeds,
                  .stream = as_streams_->open({.index = shard_id, .count = options_.shard_count}, draws_)};
  if (start.state) {
    shard.stream->load(*start.state);
    shard.batch_count = start.batch_count;
    shard.is_at_end = start.is_at_end;
  }
  OpenShard& opened = shards_.insert_or_assign(shard_id, std::move(shard)).first->second;
  while (opened.batch_count < start.batch_count && !opened.is_at_end) {
    try {
      static_cast<void>(read_next(opened, shard_id, memory));
    } catch (...) {
      // It was raised before the state was taken.
    }
  }
  return opened;
}

std::optional<Value> BatchReader::read_next(OpenShard& shard, uint32_t shard_id, Memory& memory) {
  if (shard.is_at_end) return std::nullopt;
  clock_.begin(clock_now());
  draws_.begin_shard_batch(shard.seeds, shard_id, ++shard.batch_count);
  if (!options_.batch_size) {
    auto sample = shard.stream->next(draws_);
    shard.is_at_end = !sample;
    sample_count_ = 1;
    return sample ? std::optional(copied(*sample, memory)) : std::nullopt;
  }
  const auto batch_size = static_cast<size_t>(*options_.batch_size);
  std::vector<Value> samples;
  Collator collator(memory, batch_size);
  size_t count = 0;
  while (count < batch_size) {
    const Instant begun_at = clock_now();
    auto sample = shard.stream->next(draws_);
    if (!sample) {
      shard.is_at_end = true;
      break;
    }
    const Instant got_at = clock_now();
    clock_.note_sample(got_at - begun_at);
    ++count;
    if (options_.collate_fn) {
      samples.push_back(*std::move(sample));
    } else {
      collator.add(*sample);
      clock_.note_copy(clock_now() - got_at);
    }
  }
  clock_.begin_collate(clock_now());
  sample_count_ = static_cast<uint32_t>(count);
  if (count == 0 || (count < batch_size && options_.drop_last)) return std::nullopt;
  return options_.collate_fn ? options_.collate_fn(std::move(samples)) : collator.finish();
}

std::optional<Value> BatchReader::shard_state(uint32_t shard_id) const {
  const auto found = shards_.find(shard_id);
  return found == shards_.end() ? std::nullopt : found->second.stream->state();
}

Value copied(const Value& value, Memory& memory) {
  return with_tensors(value, [&](const at::Tensor& tensor) {
    at::Tensor copy = memory.empty(tensor.sizes(), tensor.scalar_type());
    copy.copy_(tensor);
    return copy;
  });
}

}  // namespace penstock::dataset
