// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes batches of a C++ dataset (BatchReader): reads the samples that a request names, with the random numbers of
// their places (PlaceDraws), and collates them.

#include <ATen/core/Generator.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dataset/collator.h"
#include "dataset/fetch_clock.h"
#include "penstock/dataset.h"
#include "penstock/value.h"
#include "wire/epoch_seeds.h"

namespace penstock::dataset {

// The random numbers of samples, by their places in the stream. A generator is seeded when it is first used: most
// datasets do not draw. Confined to the thread that reads samples.
class PlaceDraws final : public Draws {  // NOLINT(cppcoreguidelines-virtual-class-destructor): nothing derives from it
 public:
  // `seeds_default`: also seeds torch's default generator, with the same seed as in Python's workers. Only for a
  // process that makes one batch at a time.
  explicit PlaceDraws(bool seeds_default = false);

  // Call at the start of a batch. A map-style batch has its number and the place of its first sample in the epoch's
  // order, an iterable one the shard and the batch's number in it. The samples of an iterable batch draw from the
  // batch's generator only.
  void begin_map_batch(const wire::EpochSeeds& seeds, uint64_t sequence, uint64_t first_place);
  void begin_shard_batch(const wire::EpochSeeds& seeds, uint64_t shard_id, uint64_t number);
  // Call before the sample at this place of the batch.
  void begin_sample(uint64_t place);
  // Call when the samples of the batch have been read. If each sample has separate seeds, collating uses the seeds of
  // the batch's first sample.
  void begin_collating();

  at::Generator& sample_generator() override;
  at::Generator& batch_generator() override;

 private:
  bool is_by_sample() const { return has_samples_ && seeds_.by_sample; }
  uint64_t seed_of_batch() const { return seeds_.seed_of_batch(std::span(batch_place_).first(batch_place_size_)); }
  uint64_t seed_of_sample(wire::SampleSeed which) const { return seeds_.seed_at(first_place_ + sample_place_, which); }
  void seed_default(uint64_t seed) const;

  bool seeds_default_;
  wire::EpochSeeds seeds_;
  std::array<uint64_t, 2> batch_place_{};
  size_t batch_place_size_ = 0;
  uint64_t first_place_ = 0;   // of the batch, in the order of the epoch
  uint64_t sample_place_ = 0;  // in the batch
  bool has_samples_ = false;   // whether samples have separate generators
  bool is_batch_seeded_ = false;
  bool is_sample_seeded_ = false;
  at::Generator of_batch_;
  at::Generator of_sample_;
};

struct ReaderOptions {
  std::optional<int64_t> batch_size = 1;  // none: a sample is a batch, and is not collated
  bool drop_last = false;                 // of an iterable dataset; a sampler leaves out short batches itself
  int64_t shard_count = 1;                // of an iterable dataset
  std::function<Value(std::vector<Value>)> collate_fn = {};
  // Set if the process makes one batch at a time: torch's default generator is seeded as in Python's workers.
  bool seeds_default_generator = false;
};

// Confined to the thread that reads samples, as its dataset may be.
class BatchReader {
 public:
  // One of the two datasets is null.
  BatchReader(std::shared_ptr<Dataset> by_index, std::shared_ptr<IterableDataset> as_streams, ReaderOptions options);

  bool is_iterable() const { return as_streams_ != nullptr; }

  // Identifies a batch of a map-style dataset: its number in the epoch, and the place of its first sample in the
  // epoch's order.
  struct BatchPlace {
    uint64_t sequence = 0;
    uint64_t first_place = 0;
  };
  // Returns the batch of these samples. Throws the exceptions of the dataset and of collate_fn.
  Value read(const wire::EpochSeeds& seeds, const BatchPlace& place, std::span<const int64_t> indices, Memory& memory);

  // Where a shard is opened: at its start, or after `batch_count` batches, with the stream's state at that point, if
  // any.
  struct ShardStart {
    uint64_t batch_count = 0;
    std::optional<Value> state = {};
    bool is_at_end = false;  // with a state: the stream had ended
  };
  // Returns the next batch of a shard of an iterable dataset, or none at its end. A shard not yet read in the epoch of
  // `seeds` is opened at `start`. Throws like read().
  std::optional<Value> read_shard(const wire::EpochSeeds& seeds, uint32_t shard_id, const ShardStart& start,
                                  Memory& memory);
  // The state of a shard's stream after its last batch, if it has one.
  std::optional<Value> shard_state(uint32_t shard_id) const;
  // Causes the shard to be reopened when it is next read.
  void forget_shard(uint32_t shard_id) { shards_.erase(shard_id); }
  // Whether the shard has no more samples.
  bool has_ended(uint32_t shard_id) const { return shards_.at(shard_id).is_at_end; }
  // The latest request to the dataset, for messages: "sample 12 of the dataset". Empty if that is a whole batch.
  std::string in_hand() const;
  // The time that the samples of that batch took.
  FetchClock& clock() { return clock_; }
  // The number of samples in the latest batch.
  uint32_t sample_count() const { return sample_count_; }

 private:
  struct OpenShard {
    wire::EpochSeeds seeds;
    std::unique_ptr<SampleStream> stream;
    uint64_t batch_count = 0;
    bool is_at_end = false;
  };

  Value read_samples(std::span<const int64_t> indices, Memory& memory);
  Value gather(const TensorDataset& rows, std::span<const int64_t> indices, Memory& memory) const;
  Value get(int64_t index, size_t place);
  int64_t checked(int64_t index) const;
  OpenShard& open(const wire::EpochSeeds& seeds, uint32_t shard_id, const ShardStart& start, Memory& memory);
  std::optional<Value> read_next(OpenShard& shard, uint32_t shard_id, Memory& memory);

  std::shared_ptr<Dataset> by_index_;            // shared with the readers of other threads, if allowed
  std::shared_ptr<IterableDataset> as_streams_;  // shared with them
  const TensorDataset* rows_ = nullptr;          // by_index_, if it is one and only its rows are needed
  int64_t size_ = 0;
  ReaderOptions options_;
  PlaceDraws draws_;
  std::map<uint32_t, OpenShard> shards_;
  std::optional<int64_t> index_in_hand_;
  uint32_t sample_count_ = 0;
  FetchClock clock_;
};

// Copies every tensor in a value: for the tensors of a dataset's sample that is not collated.
Value copied(const Value& value, Memory& memory);

}  // namespace penstock::dataset
