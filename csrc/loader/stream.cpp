// SPDX-License-Identifier: Apache-2.0
#include "loader/stream.h"

#include <utility>

#include "base/clock.h"
#include "base/result.h"

namespace penstock::loader {

using std::chrono::steady_clock;

namespace {

constexpr uint32_t kStretch = 4;                    // times the usual number of requested batches
constexpr uint64_t kStretchBytesMax = 64ULL << 20;  // of all batches requested then

}  // namespace

Stream::Stream(std::shared_ptr<Client> client, const StreamOptions& options)
    : client_(std::move(client)), options_(options) {
  plan_.progress = std::make_shared<EpochProgress>(client_->shard_count());
  client_->ledger().begin_stream();
}

// ---- Epochs

void Stream::begin_epoch(EpochPlan plan, const TorchSamplerOptions& sampler) {
  begin(std::move(plan));
  recipe_ = sampler;
  recipe_.skipped_batch_count = static_cast<int64_t>(plan_.through());
  recipe_.missing = plan_.missing;
  if (!adopt_early(recipe_)) {
    client_->begin_epoch(seeds_to_send(plan_.seeds), start());
    auto own = std::make_unique<TorchSampler>(recipe_, std::move(index_buffer_));
    sampler_ = own.get();
    indices_ = std::move(own);
  }
  request_first();
}

void Stream::begin_epoch(EpochPlan plan, std::unique_ptr<IndexSource> indices) {
  begin(std::move(plan));
  was_met_ = expected_ ? false : was_met_;
  expected_.reset();
  early_sampler_.reset();
  indices_ = std::move(indices);
  sampler_ = nullptr;
  client_->begin_epoch(seeds_to_send(plan_.seeds), start());
  request_first();
}

EpochStart Stream::start() const {
  return {.sequence = plan_.through(),
          .missing = plan_.missing,
          .shard_id = plan_.progress->next_shard_id() % client_->shard_count(),
          .seed = plan_.seeds.seed_of_draws()};
}

IndexSource::Indices Stream::indices_at(uint64_t place) {
  PENSTOCK_ASSERT(sampler_ != nullptr, "the indices of batch ", place, " are not torch's");
  return sampler_->indices_at(place);
}

void Stream::begin(EpochPlan plan) {
  leave_epoch();
  drawn_count_ = given_count_ = 0;
  past_epochs_ = epochs_time();
  begun_at_ = given_at_ = clock_now();
  client_->ledger().begin_epoch(begun_at_);
  if (sampler_ != nullptr) index_buffer_ = sampler_->take_buffer();
  sampler_ = nullptr;
  indices_.reset();
  plan_ = std::move(plan);
  if (!plan_.progress) plan_.progress = std::make_shared<EpochProgress>(client_->shard_count());
}

std::span<const std::byte> Stream::seeds_to_send(const wire::EpochSeeds& seeds) {
  seed_bytes_.clear();
  if (options_.is_seeded_by_batch) seed_bytes_ = seeds.to_bytes();
  return seed_bytes_;
}

// If the predicted epoch starts now, continues it with the batches that have arrived.
bool Stream::adopt_early(const TorchSamplerOptions& sampler) {
  auto expected = std::exchange(expected_, std::nullopt);
  auto early = std::exchange(early_sampler_, nullptr);
  if (!expected) return false;
  was_met_ = expected->is_met(plan_.seeds, sampler);
  if (!early || !was_met_) return false;
  expected->catch_up();
  if (sampler.generator) early->rebind(*sampler.generator);
  client_->adopt_early();
  drawn_count_ = early_drawn_count_;
  sampler_ = early.get();
  indices_ = std::move(early);
  return true;
}

// Requests batches of the next epoch, once all of this one were requested. If the last prediction failed, only the
// draws of the next epoch are recorded, until a prediction is right again.
void Stream::begin_early() {
  if (!options_.may_begin_early || expected_ || sampler_ == nullptr || !sampler_->is_exhausted()) return;
  const NextSeeds next{.seeds = {.base_seed = plan_.seeds.base_seed, .epoch = plan_.seeds.epoch + 1},
                       .draws_base_seed = options_.is_seeded_by_batch,
                       .base_generator = plan_.base_generator};
  expected_.emplace(next, recipe_);
  if (!was_met_) return;
  client_->begin_early(seeds_to_send(expected_->seeds()), expected_->seeds().seed_of_draws());
  early_sampler_ = std::make_unique<TorchSampler>(expected_->early_sampler(), sampler_->take_buffer());
  early_drawn_count_ = 0;
  fill();
}

// ---- Requests

void Stream::request_first() {
  if (options_.asks_while_room || client_->is_elastic() || sampler_ != nullptr) return fill();
  // As many calls as torch makes, which also pulls an exhausted sampler.
  for (uint32_t count = client_->depth(); count > 0; --count) ask();
}

void Stream::request_replacement() {
  if (client_->has_early() || options_.asks_while_room || client_->is_elastic() || may_stretch()) return fill();
  // After looking ahead past the end of a shard, more batches may have been requested already.
  if (client_->has_room()) ask();
}

void Stream::fill() {
  const bool is_bounded = !options_.asks_while_room || client_->is_elastic() || client_->has_early();
  while ((!is_bounded || client_->undelivered_count() < client_->depth()) && client_->has_room() && ask()) {
  }
}

// The times at which a user-defined sampler is pulled, and at which torch's draws from a user's generator, are visible,
// and must not depend on the speed of batches.
bool Stream::may_stretch() const {
  return client_->may_any_worker() && !options_.asks_while_room && sampler_ != nullptr &&
         (!recipe_.shuffle || !recipe_.generator) && !client_->has_early();
}

// The trainer waits for a batch that is late.
void Stream::stretch() {
  if (!may_stretch()) return;
  for (;;) {
    const uint64_t count = client_->undelivered_count();
    const bool fits = (count + 1) * client_->largest_batch_bytes() <= kStretchBytesMax;
    if (client_->largest_batch_bytes() == 0 || !fits || count >= uint64_t{kStretch} * client_->depth()) return;
    if (!client_->has_room() || !ask()) return;
  }
}

// Requests more batches than were delivered, where this is not observable: for shards that continue after others have
// ended, and if the number of requested batches depends on the clock anyway.
bool Stream::request_ahead(uint64_t batch_count) {
  if (!options_.is_iterable && !options_.asks_while_room) return false;
  uint64_t requested_count = 0;
  while (requested_count < batch_count && client_->has_room() && ask()) ++requested_count;
  return requested_count > 0;
}

bool Stream::ask() {
  IndexSource* source = client_->has_early() ? early_sampler_.get() : indices_.get();
  if (source == nullptr) return false;
  const auto indices = source->next();
  if (!indices) return false;
  ++(client_->has_early() ? early_drawn_count_ : drawn_count_);
  return client_->submit(*indices);
}

// ---- Events

Stream::Event Stream::try_take() {
  for (;;) {
    Event event = client_->try_next();
    switch (event.kind) {
      case Event::Kind::kMoreRoom: fill(); continue;
      case Event::Kind::kShardEnded:
        if (!options_.is_iterable)
          return failed(event.worker_id,
                        "a worker reported the end of its shard, but a map-style dataset has no shards");
        if (!event.state.empty()) end_states_[event.shard_id] = std::move(event.state);
        request_replacement();
        return event;
      // Independent of the workers' messages: an epoch ends when all of its batches were delivered.
      case Event::Kind::kEnd:
        if (options_.is_iterable || given_count_ + ahead_.size() == drawn_count_) return event;
        return failed(0, "the epoch ends here, but only " + std::to_string(given_count_ + ahead_.size()) + " of the " +
                             std::to_string(drawn_count_) + " requested batches were received");
      default: return event;
    }
  }
}

Stream::Event Stream::failed(uint32_t worker_id, std::string what) {
  return {.kind = Event::Kind::kFailed,
          .worker_id = worker_id,
          .batch = {},
          .error = Fault{Errc::kMalformed, std::move(what) + "; trainer and workers must run the same version of "
                                                             "penstock"}};
}

void Stream::give(const Event& event) {
  const Batch& batch = *event.batch;
  ++given_count_;
  given_at_ = clock_now();
  client_->count_delivered(batch);
  step_clock_.give(given_at_, Duration(client_->counters().wait_ns.value()));
  plan_.progress->answer(event.shard_id,
                         batch.record().raises() || batch.record().remote_error() || event.is_unreadable);
  if (!batch.record().state().empty())
    plan_.progress->set_shard_state(event.shard_id, {batch.record().state().begin(), batch.record().state().end()});
  request_replacement();
  begin_early();
}

Stream::Event Stream::try_next() {
  Event event;
  if (ahead_.empty()) {
    event = try_take();
  } else {
    event = std::move(ahead_.front());
    ahead_.pop_front();
  }
  if (event.kind == Event::Kind::kBatch) give(event);
  if (event.kind == Event::Kind::kEnd) finish();
  if (event.kind == Event::Kind::kNothing) stretch();
  report_pace();
  return event;
}

// Not earlier: while batches of an ended shard wait for delivery, its state is the one after the last delivered batch.
void Stream::finish() {
  for (auto& [shard_id, state] : end_states_) plan_.progress->set_shard_state(shard_id, std::move(state));
  end_states_.clear();
  plan_.progress->finish();
  step_clock_.end_epoch();
}

void Stream::drop_rest() {
  leave_epoch();
  client_->drop_rest();
}

void Stream::leave_epoch() {
  dropped_ahead_count_ += ahead_.size();
  ahead_.clear();
  end_states_.clear();
  step_clock_.end_epoch();
}

void Stream::report_pace() {
  if (!client_->is_elastic()) return;  // there is no controller to report to
  client_->note_pace({.stored_count = client_->stored_count() + static_cast<uint32_t>(ahead_.size()),
                      .wanted_count = client_->depth(),
                      .steps = step_clock_.times(),
                      .is_in_epoch = step_clock_.is_in_epoch(),
                      .given_at = step_clock_.given_at(),
                      .pause_min = step_clock_.pause_min()});
}

Stream::Event Stream::next(steady_clock::time_point deadline) {
  for (;;) {
    Event event = try_next();
    if (event.kind != Event::Kind::kNothing || !client_->wait_until(deadline)) return event;
  }
}

Stream::Event Stream::try_look_ahead(uint32_t batch_count) {
  for (;;) {
    Event event = try_take();
    if (event.kind == Event::Kind::kEnd && ahead_.size() < batch_count && request_ahead(batch_count - ahead_.size()))
      continue;
    if (event.kind != Event::Kind::kBatch) return event;
    ahead_.push_back(std::move(event));
    return {.kind = Event::Kind::kBatch, .batch = {}, .error = {}};
  }
}

}  // namespace penstock::loader
