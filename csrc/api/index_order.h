// SPDX-License-Identifier: Apache-2.0
#pragma once
// The order of an epoch: the indices of its batches from a user-defined sampler, and the requests to an iterable
// dataset, which have no indices. With shard_by_rank, the ranks of a job share the samples of one order.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "api/commit_ledger.h"
#include "loader/index_source.h"
#include "penstock/options.h"
#include "penstock/sampler.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// The order of a user-defined sampler. Confined to the trainer's thread.
class SamplerOrder final : public loader::IndexSource {
 public:
  // Batches that were delivered before the epoch was resumed are drawn and discarded, and the missing ones come first.
  SamplerOrder(std::shared_ptr<Sampler> sampler, std::optional<int64_t> batch_size, bool drop_last, PlacesLeft left);

  std::optional<Indices> next() override;

 private:
  std::optional<std::vector<int64_t>> pull();
  void resume();

  std::shared_ptr<Sampler> sampler_;  // shared with the program
  std::optional<int64_t> batch_size_;
  bool drop_last_;
  PlacesLeft left_;
  bool has_resumed_ = false;
  std::deque<PulledBatch> missing_;
  uint64_t first_place_ = 0;  // of the next batch
  bool is_at_end_ = false;
  std::vector<int64_t> indices_;
};

// One rank's share of the order of a user-defined sampler, which covers all ranks. Confined to the trainer's thread.
class SharedSamplerOrder final : public loader::IndexSource {
 public:
  // `size` is the number of samples in the order. The steps in `missing` come first, ascending. Other samples before
  // the share's first one are drawn and discarded.
  SharedSamplerOrder(std::shared_ptr<Sampler> sampler, int64_t size, const sampling::RankShareOptions& options,
                     std::vector<uint64_t> missing = {});

  std::optional<Indices> next() override;
  // The step of the last next(), of all ranks.
  const PulledBatch& last_step() const { return last_step_; }

 private:
  std::vector<int64_t> pull(uint64_t count);

  std::shared_ptr<Sampler> sampler_;  // shared with the program
  sampling::RankShareOptions options_;
  sampling::RankShare share_;
  uint64_t size_;
  std::vector<uint64_t> missing_;
  size_t missing_count_ = 0;  // of the missing steps, given so far
  uint64_t step_;
  uint64_t position_ = 0;  // in the order
  PulledBatch last_step_;
  std::vector<int64_t> indices_;
};

// An endless sequence of requests: the dataset's shards report their end.
class ShardOrder final : public loader::IndexSource {
 public:
  // One zero per sample of a batch: a Python worker counts them.
  explicit ShardOrder(std::optional<int64_t> batch_size) : zeros_(static_cast<size_t>(batch_size.value_or(1))) {
    kind_ = batch_size ? wire::IndexKind::kIntegers : wire::IndexKind::kNone;
  }

  std::optional<Indices> next() override {
    if (kind_ == wire::IndexKind::kNone) return Indices{};
    return Indices{.kind = kind_, .body = std::as_bytes(std::span(zeros_))};
  }

 private:
  wire::IndexKind kind_;
  std::vector<int64_t> zeros_;
};

// A process's rank in a job, and the number of ranks.
struct JobPlace {
  int64_t rank = 0;
  int64_t world_size = 1;
};

// The rank from the options, or from the environment's RANK and WORLD_SIZE, else 0 of 1. Throws Error kValue for
// invalid numbers.
JobPlace place_in_job(const Options& options);

// Fills in the options that depend on the rank: the rank, the size of its batches, and a generator that is the same on
// all ranks. Without shard_by_rank, returns the options unchanged. Throws Error kValue for unsupported options, with
// Python's messages.
Options with_ranks(Options options);

// Takes options that with_ranks() returned, and returns them for another rank, or another number of ranks. Throws as
// with_ranks().
Options resharded(Options options, const JobPlace& job);

// The rank's share of an epoch that starts at its first sample; none without shard_by_rank. Takes options that
// with_ranks() returned.
std::optional<sampling::RankShareOptions> share_of(const Options& options);

// A rank's part of a step of all ranks.
PulledBatch part_of(const PulledBatch& step, const sampling::RankShareOptions& share);

}  // namespace penstock::api
