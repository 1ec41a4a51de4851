// SPDX-License-Identifier: Apache-2.0
#include "api/rank_sharding.h"

#include <ATen/CPUGeneratorImpl.h>

#include <charconv>
#include <string>
#include <utility>

#include "api/exceptions.h"
#include "base/environment.h"
#include "penstock/sampler.h"

namespace penstock::api {
namespace {

std::string spoken(const std::optional<int64_t>& value) { return value ? std::to_string(*value) : "None"; }

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
    refuse(std::string(name) + "=" + spoken(value) + " requires shard_by_rank; set shard_by_rank, or leave " + name +
           " unset");
  }
  if (options.remainder) {
    refuse("remainder requires shard_by_rank; set shard_by_rank, or leave remainder unset");
  }
}

}  // namespace

JobPlace place_in_job(const Options& options) {
  if (options.rank.has_value() != options.world_size.has_value()) {
    refuse("rank and world_size must be passed together, got rank=" + spoken(options.rank) + " and world_size=" +
           spoken(options.world_size) + "; pass both, or neither to use the values of this process");
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
      refuse("batch_size is " + spoken(options.batch_size) + " and global_batch_size is " + std::to_string(size) +
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

std::optional<sampling::RankShareOptions> share_of(const Options& options) {
  if (!options.shard_by_rank) return std::nullopt;
  const int64_t step_size = options.global_batch_size.value_or(*options.batch_size * *options.world_size);
  return sampling::RankShareOptions{.rank = static_cast<uint64_t>(*options.rank),
                                    .rank_count = static_cast<uint64_t>(*options.world_size),
                                    .step_size = static_cast<uint64_t>(step_size),
                                    .remainder = static_cast<sampling::Remainder>(*options.remainder)};
}

}  // namespace penstock::api
