// SPDX-License-Identifier: Apache-2.0
#include "api/thread_maker.h"

#include <ATen/core/grad_mode.h>

#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "api/exceptions.h"
#include "base/clock.h"
#include "dataset/collator.h"
#include "dataset/nest_value.h"
#include "wire/message.h"

namespace penstock::api {
namespace {

class RecycledForDataset final : public dataset::Memory {
 public:
  explicit RecycledForDataset(loader::RecycledMemory& memory) : memory_(memory) {}
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override { return memory_.empty(sizes, dtype); }

 private:
  loader::RecycledMemory& memory_;
};

std::vector<int64_t> integers_of(const std::vector<std::byte>& bytes) {
  std::vector<int64_t> integers(bytes.size() / sizeof(int64_t));
  std::memcpy(integers.data(), bytes.data(), integers.size() * sizeof(int64_t));
  return integers;
}

}  // namespace

ThreadMaker::ThreadMaker(std::unique_ptr<dataset::BatchReader> reader, std::optional<BatchTransform> transform,
                         Shared shared)
    : reader_(std::move(reader)), transform_(std::move(transform)), shared_(std::move(shared)) {}

ThreadMaker::Made ThreadMaker::make(const session::RequestContent& content, const wire::EpochSeeds& seeds) {
  const at::NoGradGuard no_grad;
  Made made;
  auto batch = read(content, seeds);
  if (reader_->is_iterable()) {
    if (auto state = reader_->shard_state(content.request.shard_id)) {
      made.state = value_or_raise(dataset::pack_value(
          Value::dict({{"iterator", *std::move(state)}, {"ended", reader_->has_ended(content.request.shard_id)}})));
    }
  }
  if (!batch) {
    made.is_end = true;
    return made;
  }
  if (transform_) {
    const Instant read_at = clock_now();
    *batch = transform_->apply(*batch);
    reader_->clock().note_transform(clock_now() - read_at);
  }
  made.samples = reader_->clock().times(reader_->clock().begun_at(), clock_now()).in_units();
  auto nested = value_or_raise(dataset::write_value(*batch));
  made.content.tensors = std::move(nested.tensors);
  const auto nest = nested.nest.view();
  made.content.nest.assign(nest.begin(), nest.end());
  run_prefixes(content.request, made);
  return made;
}

std::optional<Value> ThreadMaker::read(const session::RequestContent& content, const wire::EpochSeeds& seeds) {
  RecycledForDataset memory(*shared_.memory);
  const uint32_t shard_id = content.request.shard_id;
  if (reader_->is_iterable())
    return reader_->read_shard(seeds, shard_id, shared_.starts->start_of(seeds, shard_id), memory);
  return reader_->read(seeds, {.sequence = content.request.sequence, .first_place = content.request.first_place},
                       integers_of(content.indices), memory);
}

void ThreadMaker::run_prefixes(const wire::BatchRequest& request, Made& made) {
  SharedPrefixes::Known known;
  if (shared_.prefixes->try_get(prefix_version_, known)) {
    prefixes_.clear();
    for (const auto& message : known.messages) prefixes_.install(*message);
    prefix_version_ = known.version;
    has_prefixes_ = !known.messages.empty();
  }
  if (!has_prefixes_) return;
  const auto began_at = std::chrono::steady_clock::now();
  worker::BatchContent content{
      .tensors = std::move(made.content.tensors), .boundary_keys = {}, .nest = made.content.nest};
  made.is_compiled = prefixes_.run(content, request.epoch_seed, request.sequence);
  made.content.tensors = std::move(content.tensors);
  made.content.boundary_keys = std::move(content.boundary_keys);
  made.prefix_time = wire::time_units(std::chrono::steady_clock::now() - began_at);
}

}  // namespace penstock::api
